"""Slot weights against loops, and the published decay constants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.objective.weights import Objective, default_gamma, slot_weights
from dflash.resource.training import Loss
from tests.support.naive_objective import naive_weights


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.sampled_from(["decay", "dpace", "uniform"]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_weights_equal_loops(data, kind, streak, alpha):
    blocks, size = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 8))
    marks = st.lists(st.booleans(), min_size=blocks * size, max_size=blocks * size)
    valid = torch.tensor(data.draw(marks)).view(blocks, size)
    valid[:, 0] = False
    correct = torch.tensor(data.draw(marks)).view(blocks, size) & valid
    probability = torch.rand(blocks, size, generator=torch.Generator().manual_seed(size)) * valid
    objective = Objective(weights=kind, gamma=3.0, streak_alpha=streak, dpace_alpha=alpha)
    found = slot_weights(objective, valid, correct, probability)
    torch.testing.assert_close(
        found.double(), naive_weights(objective, valid, correct, probability), rtol=1e-5, atol=1e-6
    )


def test_the_first_error_of_a_block_and_no_other_slot_weighs_more():
    valid = torch.tensor([[False, True, True, True, True]])
    correct = torch.tensor([[False, True, False, True, False]])
    objective = Objective(weights="uniform", streak_alpha=0.5)
    assert slot_weights(objective, valid, correct, valid.float()).tolist() == [[0, 1, 1.5, 1, 1]]


def test_a_slot_without_a_label_ends_the_streak():
    valid = torch.tensor([[False, True, False, True]])
    correct = torch.tensor([[False, True, False, False]])
    objective = Objective(weights="uniform", streak_alpha=0.5)
    assert slot_weights(objective, valid, correct, valid.float()).tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_default_decay_is_the_published_one(size, gamma):
    assert default_gamma(size) == gamma
    assert Objective.from_loss(Loss(), size).gamma == gamma


def test_every_setting_of_the_resource_is_used():
    loss = Loss(
        weights="dpace", gamma=2.0, dpace_alpha=0.1, kl_weight=0.2, kl_temperature=3.0, streak_alpha=0.4
    )
    assert Objective.from_loss(loss, 8) == Objective("dpace", 2.0, 0.1, 0.2, 3.0, 0.4)
