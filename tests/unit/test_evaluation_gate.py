"""The gate: what passes, why not, and what to try, told apart by the evidence."""

import pytest

from dflash.evaluation.acceptance import slices
from dflash.evaluation.answers import Answer, Question
from dflash.evaluation.gate import Evidence, judge, largest_gap, promote
from dflash.evaluation.report import warnings
from dflash.evaluation.roofline import assess
from dflash.resource.evaluation import EvaluationGate
from dflash.storage.store import Store

GATE = EvaluationGate(min_acceptance_length=2.0, min_speedup=1.2)


def evidence(
    length: float = 2.5, speedup: float | None = 1.5, divergences: int | None = 0, **more: object
) -> Evidence:
    return Evidence(acceptance_length=length, speedup=speedup, divergences=divergences, **more)


def test_a_good_drafter_passes_and_is_told_why() -> None:
    verdict = judge(GATE, evidence())
    assert verdict.passed
    assert "acceptance length 2.50 is at least 2" in verdict.reason
    assert judge(EvaluationGate(), evidence(1.0, None, None)).reason == "the gate has no limits."


@pytest.mark.parametrize(
    ("given", "reason", "advice"),
    [
        (evidence(1.5), "acceptance length 1.50 is below 2", "Train on more prompts"),
        (evidence(speedup=0.9), "speed-up 0.90 is below 1.2", "see the roofline"),
        (evidence(speedup=None), "speed-up was not measured", "see the roofline"),
        (evidence(divergences=3), "3 greedy answers differ", "no drafter can cause"),
        (evidence(1.0, diagnosis="tap 4 is off"), "1.00 is below 2", "tap 4 is off"),
        (evidence(1.5, gap="Acceptance is 1.1 for thinking on"), "below 2", "thinking on"),
        (evidence(1.02, training_accuracy=0.9), "below 2", "served otherwise than it was trained"),
    ],
)
def test_a_failure_says_what_to_try(given: Evidence, reason: str, advice: str) -> None:
    verdict = judge(GATE, given)
    assert not verdict.passed
    assert reason in verdict.reason
    assert advice in verdict.advice


def test_not_a_number_never_passes() -> None:
    assert not judge(GATE, evidence(float("nan"))).passed


def answers(sample: str, emitted: int, count: int = 120) -> Answer:
    return Answer(
        sample_id=sample,
        contender="dflash",
        tokens=list(range(1 + emitted * count)),
        emitted=[emitted] * count,
        accepted=[emitted - 1] * count,
        finish_reason="length",
    )


def test_a_mode_that_does_much_worse_is_named() -> None:
    questions = {
        "a": Question(sample_id="a", prompt_ids=[1], thinking=True, language="latin"),
        "b": Question(sample_id="b", prompt_ids=[1], thinking=False, language="latin"),
    }
    found = slices([answers("a", 2), answers("b", 6)], questions, 8)
    assert "2.00 for thinking on and 6.00 for off" in largest_gap(found)
    assert largest_gap(slices([answers("a", 5), answers("b", 6)], questions, 8)) == ""


def test_a_fall_beyond_a_window_and_an_invented_acceptance_are_warned_of() -> None:
    questions = {
        "short": Question(sample_id="short", prompt_ids=[1] * 10),
        "long": Question(sample_id="long", prompt_ids=[1] * 5000),
    }
    given = [answers("short", 6, 30), answers("long", 2, 30)]
    found = warnings(given, slices(given, questions, 8), trained_length=4096, questions=questions)
    assert any("sliding window" in w for w in found)
    assert any("training was cut at 4,096" in w for w in found)
    constant = [answers("short", 4, 300)]
    found = warnings(constant, slices(constant, questions, 8), trained_length=4096, questions=questions)
    assert any("looks simulated" in w for w in found)


def test_the_roofline_tells_bandwidth_compute_and_host_apart() -> None:
    def told(step_seconds: float, concurrency: int = 1):  # type: ignore[no-untyped-def]
        return assess(
            weight_bytes=27e9, kv_bytes=1e8, draft_bytes=3e9, parameters=13.5e9, concurrency=concurrency,
            step_seconds=step_seconds, bandwidth=3e12, flops=5e14, acceptance_length=4.0,
            measured_speedup=3.0,
        )  # fmt: skip

    reading = told(0.0109)
    assert reading.bound == "bandwidth"
    assert reading.bandwidth_share == pytest.approx(0.83, abs=0.01)
    assert "reading 27 GB of weights" in reading.sentence
    assert "nothing but fewer steps will help" in reading.sentence
    assert reading.expected_speedup == pytest.approx(3.6)
    assert told(0.1).bound == "host"
    assert told(0.06, concurrency=1024).bound == "compute"


def test_promotion_is_a_swap_that_keeps_what_it_replaced(store: Store) -> None:
    first = promote(store, "q", drafter="d1", evaluation="e1", report_sha256="s1", acceptance_length=2.0)
    assert (
        promote(store, "q", drafter="d1", evaluation="e1", report_sha256="s1", acceptance_length=2.0) == first
    )
    second = promote(store, "q", drafter="d2", evaluation="e2", report_sha256="s2", acceptance_length=2.1)
    assert second["replaces"] == "d1"
    assert store.get_json("promoted/q.json") == second
