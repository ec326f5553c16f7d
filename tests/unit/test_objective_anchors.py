"""Anchors: where they may be, how many, and that only (seed, epoch, sample id) decides."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.objective.anchors import candidates, draw_anchors, seed_of


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 70), st.integers(0, 9))
def test_anchors_are_distinct_ascending_and_start_two_supervised_tokens(marks, budget, seed):
    supervised = torch.tensor(marks)
    drawn = draw_anchors(supervised, budget, seed, 0, "s").tolist()
    allowed = [a for a in range(len(marks) - 1) if marks[a] and marks[a + 1]]
    assert candidates(supervised).tolist() == allowed
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(allowed)
    assert len(drawn) == min(budget, len(allowed))


def test_a_draw_depends_on_seed_epoch_and_sample_alone():
    supervised = torch.ones(500, dtype=torch.bool)

    def draw(*key):
        return draw_anchors(supervised, 20, *key).tolist()

    base = draw(1, 2, "a")
    torch.manual_seed(123)
    assert draw(1, 2, "a") == base
    assert base not in (draw(0, 2, "a"), draw(1, 3, "a"), draw(1, 2, "b"))
    assert len({seed_of(p, 1, 2, s) for p in ("anchors", "noise") for s in ("a", "b", "a\0")}) == 6


def test_draws_are_uniform():
    supervised = torch.ones(101, dtype=torch.bool)
    counts = torch.zeros(100)
    for epoch in range(2000):
        counts[draw_anchors(supervised, 10, 0, epoch, "s")] += 1
    expected, deviation = 200.0, (2000 * 0.1 * 0.9) ** 0.5
    assert ((counts - expected).abs() < 5 * deviation).all()


def test_a_long_neighbour_takes_nothing_from_a_short_sample():
    short, long = torch.ones(201, dtype=torch.bool), torch.ones(7801, dtype=torch.bool)
    assert len(draw_anchors(short, 512, 0, 0, "short")) == 200
    assert len(draw_anchors(long, 512, 0, 0, "long")) == 512
