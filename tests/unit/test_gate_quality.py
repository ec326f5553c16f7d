"""The gate drops what is not worth training on, for the reason that explains it, and refuses bad datasets."""

import numpy as np
import pytest

from dflash.data.render import Renderer, Thinking
from dflash.generation.gate import Answer, Judge, Limits, Tally
from dflash.resource.generation import Gate
from tests.support.tiny_tokenizer import tiny_tokenizer

LIMITS = Limits.of(Gate(), block_size=16)
TOKENIZER = tiny_tokenizer()
JUDGE = Judge.of(LIMITS, TOKENIZER)
RENDERER = Renderer(TOKENIZER, thinking=True)
PROSE = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(120))
NO_THINKING = Thinking(None, closed=True)


def reason(text: str, finish: str = "stop", *, opened: bool = False, judge: Judge = JUDGE) -> str | None:
    ids = np.array(TOKENIZER.encode(text + ("<|im_end|>" if finish == "stop" else "")), np.int32)
    return judge.reason(Answer(ids, finish, RENDERER.read_thinking(ids, opened=opened)))


def test_a_good_answer_is_kept_with_and_without_thinking() -> None:
    assert reason(PROSE) is None
    assert reason(f"hm{PROSE}</think>{PROSE}", opened=True) is None
    assert reason(f"<think>hm</think>{PROSE}") is None


def test_no_visible_answer_is_never_a_success() -> None:
    assert reason("") == "empty"
    assert reason("  \n ") == "empty"
    assert reason(f"{PROSE}</think>\n\n", opened=True) == "empty"
    assert reason("The answer is 4.", opened=True) == "think_skipped"
    assert reason(PROSE, "length", opened=True) == "think_cut"
    assert JUDGE.reason(Answer(np.zeros(0, np.int32), "stop", NO_THINKING)) == "empty"


def test_answers_shorter_than_two_blocks_are_dropped_and_the_limit_is_exact() -> None:
    assert LIMITS.min_supervised == 32
    kinds = [reason(PROSE[: n - 1]) for n in (6, 31, 32, 120)]
    assert kinds == ["too_short", "too_short", None, None]


def test_cut_answers_are_dropped_unless_they_are_asked_for() -> None:
    assert reason(PROSE, "length") == "truncated"
    keeping = Judge.of(Limits.of(Gate(truncated="keep"), 16), TOKENIZER)
    assert reason(PROSE, "length", judge=keeping) is None


def test_loops_are_dropped_also_inside_thinking() -> None:
    assert reason(PROSE + "again and " * 60) == "repetition"
    assert reason(PROSE + "again and " * 60, "length") == "repetition"
    assert reason(PROSE + "wait, " * 100, "length", opened=True) == "repetition"


def test_tool_call_loops_are_dropped_and_different_calls_are_not() -> None:
    calls = [f'<tool_call>{{"name": "f", "arguments": {{"q": "{q}"}}}}</tool_call>' for q in "aaab"]
    assert reason(PROSE + "".join(calls[:3])) == "tool_loop"
    assert reason(PROSE + "".join(calls[2:])) is None


def test_the_disaster_set_is_refused_within_a_hundred_samples_with_its_cause() -> None:
    # 1,000 rows, 87 % of them with exactly six supervised tokens
    six = np.random.default_rng(3).random(1000) < 0.87
    tally = Tally(LIMITS)
    for row, short in enumerate(six):
        ids = np.array([*TOKENIZER.encode(PROSE[:5] if short else PROSE), 258], np.int32)
        tally.add(f"sample-{row}", JUDGE.reason(Answer(ids, "stop", NO_THINKING)), len(ids))
        if (sentence := tally.refusal()) is not None:
            break
    assert tally.seen == 100
    assert sentence is not None
    assert "too few supervised tokens" in sentence
    assert "have exactly 6" in sentence
    assert all(f"sample-{row}" in sentence for row in np.flatnonzero(six)[:3])
    assert sentence.count(". ") == 0


def test_tool_call_loops_at_three_percent_are_kept_out_and_counted_and_do_not_refuse_the_set() -> None:
    tally = Tally(LIMITS)
    for row in range(1000):
        tally.add(str(row), "tool_loop" if row % 33 == 0 else None)
    assert tally.refusal(final=True) is None
    assert tally.dropped == {"tool_loop": 31}
    assert tally.examples["tool_loop"] == ["0", "33", "66"]


@pytest.mark.parametrize(
    ("drops", "told"),
    [
        ({"empty": 3}, "have no visible answer"),
        ({"think_skipped": 2, "think_cut": 1}, "fit the target"),
        ({"repetition": 3, "tool_loop": 3}, "go round in loops"),
        ({"truncated": 11}, "raise generation.maxTokens"),
        ({"too_short": 6, "truncated": 5}, "were dropped"),
    ],
)
def test_each_limit_has_its_own_sentence(drops: dict[str, int], told: str) -> None:
    tally = Tally(LIMITS)
    for kind, count in drops.items():
        for number in range(count):
            tally.add(f"{kind}-{number}", kind)
    for number in range(100 - tally.seen):
        tally.add(str(number), None)
    sentence = tally.refusal()
    assert sentence is not None
    assert told in sentence


def test_shares_at_the_limit_pass_and_few_samples_say_nothing_before_the_end() -> None:
    tally = Tally(LIMITS)
    for number in range(99):
        tally.add(str(number), "too_short" if number < 50 else None)
    assert tally.refusal() is None
    assert tally.refusal(final=True) is not None
    exact = Tally(LIMITS)
    for number in range(100):
        exact.add(str(number), "truncated" if number < 10 else None)
    assert exact.refusal(final=True) is None
