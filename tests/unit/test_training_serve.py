"""The target's check of its own kernels: states must not depend on a batch's other samples."""

import dataclasses
from dataclasses import dataclass

import pytest

from dflash.channel.interface import Identity
from dflash.errors import DflashError
from dflash.model.facts import TargetFacts
from dflash.model.target import load_target
from dflash.training.run import Plan
from dflash.training.serve import check_capture
from tests.support.tiny import draft_shape, save_tiny_target


@dataclass
class LeakyFakeTarget:
    """A target whose second sample of a batch gets the states of the first: the fault of mixed-up kernels."""

    real: object

    @property
    def facts(self):
        return self.real.facts

    def capture(self, batch, taps, final):
        states = self.real.capture(batch, taps, final)
        if len(states) > 1:
            mixed = states[1].taps.clone()
            mixed[:5] = states[0].taps[:5]
            states[1] = dataclasses.replace(states[1], taps=mixed)
        return states


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), dtype="float32")


@pytest.fixture(scope="module")
def plan(target):
    facts: TargetFacts = target.facts
    identity = Identity(
        fingerprint="f", taps=(0, 1), hidden_size=facts.hidden_size, dtype="float32", final=True
    )
    return Plan(facts, draft_shape(), identity)


def test_a_good_target_has_the_same_states_in_any_company(target, plan):
    check_capture(target, plan)


def test_a_target_that_mixes_samples_up_is_refused(target, plan):
    with pytest.raises(DflashError, match="depend on what else is in a batch"):
        check_capture(LeakyFakeTarget(target), plan)
