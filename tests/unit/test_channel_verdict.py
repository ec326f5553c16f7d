"""The verdict's sentence, and that what it proposes is never worse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.channel.verdict import judge, wanted_targets


def test_idle_targets_mean_that_drafters_limit():
    verdict = judge(5, 3, target_idle=0.41, drafter_wait=0.0)
    assert (
        verdict.sentence
        == "drafters are the bottleneck: targets idle 41 %; a 4:4 split would give about 1.3×"
    )
    assert (verdict.bottleneck, verdict.targets, verdict.drafters) == ("drafters", 4, 4)


def test_waiting_drafters_mean_that_targets_limit():
    verdict = judge(2, 6, target_idle=0.02, drafter_wait=0.5)
    assert verdict.sentence.startswith("targets are the bottleneck: drafters wait 50 %; a 3:5 split")


def test_with_one_of_each_only_more_processes_help():
    verdict = judge(1, 1, target_idle=0.5, drafter_wait=0.01)
    assert verdict.sentence == (
        "drafters are the bottleneck: targets idle 50 %; one more drafter (1:2) would give about 2.0×"
    )
    assert (verdict.targets, verdict.drafters) == (1, 1)


def test_balance_is_said_to_be_so():
    assert judge(5, 3, 0.04, 0.03).sentence == (
        "targets and drafters are balanced: targets idle 4 %, drafters wait 3 %"
    )


def test_when_both_sides_wait_the_channel_limits():
    assert judge(2, 2, 0.4, 0.35).bottleneck == "channel"


@pytest.mark.parametrize(("idle", "wait"), [(None, 0.1), (0.1, None)])
def test_nothing_is_claimed_before_it_is_measured(idle, wait):
    assert judge(1, 1, idle, wait).bottleneck == "unknown"


@given(
    st.integers(1, 64), st.integers(1, 24), st.floats(0, 1, allow_nan=False), st.floats(0, 1, allow_nan=False)
)
def test_a_proposed_split_uses_as_many_processes_and_gains(targets, drafters, idle, wait):
    verdict = judge(targets, drafters, idle, wait)
    assert verdict.targets + verdict.drafters == targets + drafters
    assert min(verdict.targets, verdict.drafters) >= 1
    if (verdict.targets, verdict.drafters) != (targets, drafters):
        assert verdict.gain >= 1.05
        # the side that limits never gets fewer
        if verdict.bottleneck == "drafters":
            assert verdict.drafters > drafters
        else:
            assert verdict.targets > targets


@given(st.integers(1, 64), st.floats(0.1, 50.0))
def test_following_what_is_wanted_comes_to_rest_with_drafters_that_hardly_wait(targets, needed):
    """`needed` is how many targets the drafters would keep busy."""

    def measured(count: int) -> tuple[float, float]:
        return max(0.0, 1.0 - needed / count), max(0.0, 1.0 - count / needed)

    for _ in range(20):
        targets = wanted_targets(targets, *measured(targets))
    assert wanted_targets(targets, *measured(targets)) == targets
    idle, wait = measured(targets)
    assert wait < 0.10
    assert targets == 1 or idle < 0.10 or targets - 1 < 1.15 * needed


def test_no_other_number_is_wanted_before_it_is_measured_or_while_the_channel_limits():
    assert wanted_targets(3, None, 0.5) == wanted_targets(3, 0.5, None) == 3
    assert wanted_targets(3, 0.4, 0.4) == wanted_targets(3, 0.05, 0.05) == 3
    assert wanted_targets(0, 0.0, 1.0) == 0
