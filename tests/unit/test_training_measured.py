"""When checkpoints are measured, which is exported, and what ends a run: rules on measured acceptance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash.resource.training import EarlyStop, Training, TrainingEvaluation
from dflash.training.measured import Measured, best, chosen, due, early_stop
from tests.support.measured import measured


def history(*lengths: float) -> list[Measured]:
    return [measured(100 * (place + 1), length) for place, length in enumerate(lengths)]


def spec(**stop: object) -> TrainingEvaluation:
    return TrainingEvaluation(every_steps=100, stop=EarlyStop(**stop))


def test_off_by_default_nothing_is_ever_due() -> None:
    off = TrainingEvaluation()
    assert not off.enabled
    assert not due(off, committed=10_000, last=0, seconds=1e9)


def test_due_by_steps_or_by_minutes_whichever_comes_first() -> None:
    both = TrainingEvaluation(every_steps=100, every_minutes=2.0)
    assert not due(both, committed=99, last=0, seconds=119.0)
    assert due(both, committed=100, last=0, seconds=0.0)
    assert due(both, committed=1, last=0, seconds=120.0)
    by_time = TrainingEvaluation(every_minutes=2.0)
    assert not due(by_time, committed=10_000, last=0, seconds=1.0)


@given(committed=st.integers(0, 1000), behind=st.integers(0, 1000), seconds=st.floats(0, 1e6))
def test_without_a_newer_checkpoint_nothing_is_due(committed: int, behind: int, seconds: float) -> None:
    both = TrainingEvaluation(every_steps=1, every_minutes=0.001)
    assert not due(both, committed, committed + behind, seconds)


def test_the_best_accepts_most_and_of_equals_it_is_the_one_trained_longest() -> None:
    assert best([]) is None
    assert best(history(1.0, 2.5, 2.0)) == measured(200, 2.5)
    assert best(history(2.5, 1.0, 2.5)) == measured(300, 2.5)


def test_a_better_checkpoint_is_exported_only_once_the_last_is_measured_too() -> None:
    found = history(1.5, 3.0, 2.0)
    assert chosen(spec(), found, last=300) == measured(200, 3.0)
    assert chosen(spec(), found, last=400) is None
    assert chosen(spec(), history(1.0, 2.0, 3.0), last=300) is None
    assert chosen(TrainingEvaluation(every_steps=100, best_checkpoint=False), found, last=300) is None
    assert chosen(spec(), [], last=300) is None


def test_low_acceptance_ends_a_run_once_its_share_is_done_and_says_why() -> None:
    rule = spec(min_acceptance_length=1.3, after=0.25)
    assert early_stop(rule, history(1.02), steps=1000) == ""
    reason = early_stop(rule, history(1.02, 1.02, 1.02), steps=1000)
    assert "step 300 of 1000" in reason
    assert "1.02, below training.evaluation.stop.minAcceptanceLength 1.3" in reason
    assert early_stop(rule, history(1.02, 1.02, 1.4), steps=1000) == ""


def test_no_new_best_for_so_many_measurements_ends_a_run() -> None:
    rule = spec(patience=2)
    assert early_stop(rule, history(1.0, 2.0, 1.9), steps=1000) == ""
    reason = early_stop(rule, history(1.0, 2.0, 1.9, 1.8), steps=1000)
    assert "has not risen over 2.00, of step 200, in 2 measurements" in reason
    assert early_stop(rule, history(1.0, 2.0, 1.9, 2.1), steps=1000) == ""


def test_without_a_rule_or_a_measurement_nothing_ends() -> None:
    assert early_stop(spec(), history(1.0, 1.0, 1.0, 1.0), steps=10) == ""
    assert early_stop(spec(min_acceptance_length=9.0, patience=1), [], steps=10) == ""


def test_a_measurement_comes_back_from_the_store_as_it_was() -> None:
    found = measured(7, 1.25, attempt=3)
    assert Measured.model_validate_json(found.model_dump_json()) == found
    assert (found.place.step, found.place.attempt, found.length) == (7, 3, 1.25)


def test_a_stop_without_measurements_and_a_wait_beyond_the_deadline_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"everySteps or evaluation\.everyMinutes"):
        Training(evaluation=TrainingEvaluation(stop=EarlyStop(patience=3)))
    with pytest.raises(ValidationError, match="waitSeconds 600 must be below progressDeadlineSeconds 60"):
        Training(evaluation=TrainingEvaluation(every_steps=10), progress_deadline_seconds=60)
    assert Training(progress_deadline_seconds=60).evaluation.enabled is False
