"""Acceptance is counted by stated definitions, and its intervals hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.evaluation import acceptance
from dflash.evaluation.answers import Answer, Question, accept, cut, writing_system


def answer(sample: str, emitted: list[int], accepted: list[int] | None = None, **kwargs: object) -> Answer:
    return Answer(
        sample_id=sample,
        contender="dflash",
        tokens=list(range(1 + sum(emitted))),
        emitted=emitted,
        accepted=accepted if accepted is not None else [e - 1 for e in emitted],
        finish_reason="length",
        **kwargs,
    )


def test_three_rounds_that_accept_0_2_and_5_drafts() -> None:
    length = acceptance.acceptance_length([[1, 3, 6]], [[0, 2, 5]])
    assert length.pooled == pytest.approx(10 / 3)
    assert length.pooled_drafts_only == pytest.approx(7 / 3)
    assert length.pooled_with_first_token == pytest.approx(11 / 3)


def test_pooled_and_per_response_mean_differ_on_a_hand_made_trace() -> None:
    rounds = [[2, 2, 2, 2], [8]]
    length = acceptance.acceptance_length(rounds, [[1, 1, 1, 1], [7]])
    assert length.pooled == pytest.approx(16 / 5)
    assert length.per_response_mean == pytest.approx((2 + 8) / 2)
    assert (length.responses, length.tokens, length.verifications) == (2, 16, 5)


def test_an_answer_that_ends_with_the_prefills_token_has_no_acceptance() -> None:
    length = acceptance.acceptance_length([[], [2]], [[], [1]])
    assert (length.responses, length.pooled) == (1, 2.0)
    assert math.isnan(acceptance.acceptance_length([[]], [[]]).pooled)


def test_tokens_after_the_end_inside_an_accepted_draft_are_not_counted() -> None:
    end = 99
    draft = [11, 12, end, 14, 15]
    agreed, emitted = accept(draft, [11, 12, end, 14, 15, 16])
    assert (agreed, emitted) == (5, [11, 12, end, 14, 15, 16])
    assert cut(emitted, frozenset([end]), room=100) == ([11, 12, end], "stop")


@given(
    st.lists(st.integers(0, 3), max_size=7),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.integers(1, 9),
)
def test_what_is_emitted_is_always_the_targets_own_choice(
    draft: list[int], posterior: list[int], room: int
) -> None:
    agreed, emitted = accept(draft, posterior[: len(draft) + 1])
    assert emitted == posterior[: agreed + 1]
    assert draft[:agreed] == emitted[:agreed]
    assert agreed == len(draft) or draft[agreed] != posterior[agreed]
    kept, reason = cut(emitted, frozenset([3]), room)
    assert kept == emitted[: len(kept)]
    assert 3 not in kept[:-1]
    assert len(kept) <= room
    assert bool(reason) == (3 in kept or len(kept) == room)


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=20), min_size=1, max_size=10))
def test_by_slot_falls_and_sums_to_the_drafts_only_length(accepted: list[list[int]]) -> None:
    shares = acceptance.by_slot(accepted, block_size=8)
    assert len(shares) == 7
    assert shares == sorted(shares, reverse=True)
    length = acceptance.acceptance_length([[a + 1 for a in r] for r in accepted], accepted)
    assert sum(shares) == pytest.approx(length.pooled_drafts_only)
    assert sum(acceptance.histogram(accepted, 8)) == length.verifications


def simulated(generator: np.random.Generator, responses: int) -> tuple[list[list[int]], list[list[int]]]:
    """Responses of 48 tokens, each with a difficulty of its own: rounds of one response are alike."""
    rounds = []
    for ease in generator.beta(3, 4, size=responses):
        mine: list[int] = []
        while sum(mine) < 48:
            mine.append(1 + min(int(generator.geometric(1 - ease)) - 1, 7))
        rounds.append(mine)
    return rounds, [[r - 1 for r in mine] for mine in rounds]


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    truth = acceptance.acceptance_length(*simulated(generator, 20_000))
    covered = {"pooled": 0, "mean": 0}
    trials = 400
    for _ in range(trials):
        length = acceptance.acceptance_length(*simulated(generator, 60))
        assert length.pooled_interval
        assert length.per_response_interval
        covered["pooled"] += length.pooled_interval.low <= truth.pooled <= length.pooled_interval.high
        covered["mean"] += (
            length.per_response_interval.low <= truth.per_response_mean <= length.per_response_interval.high
        )
    # 95 % of 400 trials, three standard errors (1.1 %) and a little for skew.
    assert 0.91 <= covered["pooled"] / trials <= 0.985
    assert 0.91 <= covered["mean"] / trials <= 0.985


def test_the_speedups_interval_covers_the_truth() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        tokens = generator.integers(20, 60, size=60)
        plain = tokens * 0.030 * generator.lognormal(0, 0.1, size=60)
        fast = tokens * 0.020 * generator.lognormal(0, 0.2, size=60)
        ratio, interval = acceptance.speedup(
            list(zip(plain, tokens, strict=True)), list(zip(fast, tokens, strict=True)), draws=400
        )
        covered += interval.low <= 1.5 * math.exp(0.005 - 0.02) <= interval.high
        assert interval.low <= ratio <= interval.high
    assert 0.89 <= covered / 200 <= 0.99


def test_student_quantiles_meet_the_tables_end() -> None:
    assert acceptance._student(10) == 2.228
    assert acceptance._student(11) == pytest.approx(2.201, abs=3e-3)
    assert acceptance._student(59) == pytest.approx(2.001, abs=1e-3)


def question(sample: str, length: int, **kwargs: object) -> Question:
    return Question(sample_id=sample, prompt_ids=[1] * length, **kwargs)


def test_slices_tell_languages_thinking_tools_lengths_and_positions_apart() -> None:
    questions = {
        "a": question("a", 10, language="latin", thinking=False, group="code"),
        "b": question("b", 300, language="cjk", thinking=True, tools=True, group="code"),
    }
    answers = [answer("a", [6] * 20), answer("b", [3] * 20)]
    found = acceptance.slices(answers, questions, block_size=8)
    assert {k: v.length.pooled for k, v in found["language"].items()} == {"cjk": 3.0, "latin": 6.0}
    assert {k: v.length.pooled for k, v in found["thinking"].items()} == {"off": 6.0, "on": 3.0}
    assert {k: v.length.pooled for k, v in found["tools"].items()} == {"off": 6.0, "on": 3.0}
    assert list(found["prompt_length"]) == ["0-255", "256-1023"]
    assert found["group"]["code"].length.verifications == 40
    # Positions: the first 64 tokens of an answer, then the rest.
    assert list(found["output_position"]) == ["0-63", "64-255"]
    assert sum(s.length.verifications for s in found["output_position"].values()) == 40
    assert found["context_length"]["256-1023"].length.pooled == 3.0


def test_writing_systems() -> None:
    assert writing_system("What is the capital of France?") == "latin"
    assert writing_system("法国的首都是哪里？ (Paris)") == "cjk"
    assert writing_system("Столица Франции") == "cyrillic"
    assert writing_system("12 + 30") == "none"


def test_miscounted_answers_are_refused() -> None:
    answer("a", [1, 2]).check()
    with pytest.raises(AssertionError, match="were counted"):
        answer("a", [1, 2]).model_copy(update={"tokens": [1, 2, 3]}).check()
