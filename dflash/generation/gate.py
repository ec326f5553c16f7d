"""The quality gate: which answers are worth training on, and when a dataset is not.

Pure: it is given samples one after another and keeps counts, so it runs in a worker while answers arrive,
over the committed log, and on a file that someone else made. It drops a sample for one reason, the one that
explains most, and turns rates into a single sentence that names the cause.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash.data.render import Thinking
from dflash.data.rows import Ids
from dflash.generation.repetition import degenerate, measure
from dflash.generation.toolcalls import OPEN as OPEN_CALL
from dflash.generation.toolcalls import SAME as SAME_CALLS
from dflash.generation.toolcalls import loops
from dflash.resource.generation import Gate

EMPTY = ("empty", "think_skipped", "think_cut")
"""Reasons that leave no visible answer."""
REPEATING = ("repetition", "tool_loop")

CAUSES = {
    "empty": ("are empty", "check the chat template and the engine's stop tokens"),
    "think_skipped": (
        "end inside their thinking, with no visible answer",
        "check that the chat template and generation.thinking fit the target",
    ),
    "think_cut": ("are cut by maxTokens while thinking", "raise generation.maxTokens or turn thinking off"),
    "truncated": (
        "are cut by maxTokens",
        "raise generation.maxTokens, or keep them with gate.truncated: keep",
    ),
    "too_short": (
        "have too few supervised tokens",
        "check the chat template, the stop tokens and where the answers come from",
    ),
    "repetition": (
        "repeat themselves in a loop",
        "check the sampling parameters: greedy decoding loops often",
    ),
    "tool_loop": ("repeat the same tool call", "check the tools in the prompts and the sampling parameters"),
    "duplicate": ("are there already", "remove repeated rows"),
    "prompt_too_long": (
        "have prompts that leave no room in the context",
        "shorten them or raise contextLength",
    ),
    "template": ("are refused by the chat template", "check the order of roles in the prompts"),
    "bad_tool_call": ("have tool calls whose arguments are not a JSON object", "repair these prompts"),
    "refused": ("were refused by the engine", "see the worker's log for its words"),
    "unanswered": ("were never answered by the engine", "see the engine's log"),
    "nothing_supervised": (
        "have no supervised token, or nothing but supervised tokens",
        "check where the loss mask comes from",
    ),
}
"""Reason: what is wrong with such samples, and what to do next."""

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What the gate tolerates."""

    min_supervised: int
    truncated: bool
    """Drop answers that were cut."""
    max_dropped: float
    max_empty: float
    max_repeating: float
    check_after: int

    @classmethod
    def of(cls, gate: Gate, block_size: int) -> "Limits":
        """The declared limits; the least supervised tokens are two blocks by default."""
        return cls(
            min_supervised=gate.min_supervised_tokens or 2 * block_size,
            truncated=gate.truncated == "drop",
            max_dropped=gate.max_dropped_share,
            max_empty=gate.max_empty_share,
            max_repeating=gate.max_repetition_share,
            check_after=gate.check_after,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gate looks at. Ids are int32, the end-of-turn token included."""

    output_ids: Ids
    finish_reason: str
    thinking: Thinking


class Judge:
    """Finds the reason to drop an answer. `text` decodes ids without special tokens, `raw` with them.

    `call_ids` are the ids of a tool call's opening tag: text is decoded only where they occur often enough.
    """

    def __init__(
        self, limits: Limits, text: Callable[[Ids], str], raw: Callable[[Ids], str], call_ids: list[int]
    ) -> None:
        self.limits = limits
        self._text = text
        self._raw = raw
        self._call = call_ids[0] if call_ids else -1

    @classmethod
    def of(cls, limits: Limits, tokenizer: object) -> "Judge":
        """A judge for answers in a tokenizer's ids."""
        decode = tokenizer.decode  # type: ignore[attr-defined]
        return cls(
            limits,
            lambda ids: decode(ids, skip_special_tokens=True),
            lambda ids: decode(ids, skip_special_tokens=False),
            tokenizer.encode(OPEN_CALL, add_special_tokens=False),  # type: ignore[attr-defined]
        )

    def reason(self, answer: Answer) -> str | None:
        """Why this answer is dropped, or None when it is kept."""
        ids = answer.output_ids
        cut = answer.finish_reason == "length"
        if len(ids) == 0:
            return "empty"
        if not answer.thinking.closed:
            loop = measure(_without_end(ids, cut=cut))
            if degenerate(loop, len(ids), cut=cut):
                return "repetition"
            return "think_cut" if cut else "think_skipped"
        visible = ids[answer.thinking.span[1] if answer.thinking.span else 0 :]
        # Decoding costs more than all the rest, and a long answer is not blank unless it is a loop.
        if len(visible) <= 2 * self.limits.min_supervised and not self._text(visible).strip():
            return "empty"
        if np.count_nonzero(ids == self._call) >= SAME_CALLS and loops(self._raw(ids)):
            return "tool_loop"
        if degenerate(measure(_without_end(ids, cut=cut)), len(ids), cut=cut):
            return "repetition"
        if cut and self.limits.truncated:
            return "truncated"
        if len(ids) < self.limits.min_supervised:
            return "too_short"
        return None


def _without_end(ids: Ids, *, cut: bool) -> Ids:
    return ids if cut else ids[:-1]


class Tally:
    """Counts of what was kept and dropped, and the verdict on the whole. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self.seen = 0
        self.dropped: Counter[str] = Counter()
        self.short_lengths: Counter[int] = Counter()
        """Supervised tokens of the samples that were too short: a spike here names the disaster."""
        self.examples: dict[str, list[str]] = {}

    def add(self, sample_id: str, reason: str | None, supervised: int | None = None) -> None:
        """Count one sample."""
        with self._lock:
            self.seen += 1
            if reason is None:
                return
            self.dropped[reason] += 1
            if reason == "too_short" and supervised is not None:
                self.short_lengths[supervised] += 1
            examples = self.examples.setdefault(reason, [])
            if len(examples) < _EXAMPLES:
                examples.append(sample_id)

    def share(self, reasons: tuple[str, ...] | None = None) -> float:
        """Share of the samples seen that were dropped for these reasons, or for any."""
        count = self.dropped.total() if reasons is None else sum(self.dropped[reason] for reason in reasons)
        return count / self.seen if self.seen else 0.0

    def refusal(self, *, final: bool = False) -> str | None:
        """One sentence on why the dataset is refused, or None. Early only after `check_after` samples."""
        if self.seen == 0 or (self.seen < self.limits.check_after and not final):
            return None
        limits = self.limits
        if self.share() <= min(limits.max_empty, limits.max_repeating, limits.max_dropped):
            return None  # what nearly every call comes to
        checks: list[tuple[str, tuple[str, ...] | None, float]] = [
            ("have no visible answer", EMPTY, limits.max_empty),
            ("go round in loops", REPEATING, limits.max_repeating),
            ("were dropped", None, limits.max_dropped),
        ]
        over = [check for check in checks if self.share(check[1]) > check[2]]
        if not over:
            return None
        # The check that covers most samples tells the most.
        what, reasons, limit = max(over, key=lambda check: self.share(check[1]))
        count = round(self.share(reasons) * self.seen)
        reason = max(reasons or tuple(self.dropped), key=lambda name: self.dropped[name])
        problem, advice = CAUSES.get(reason, (f"are {reason}", "look at them"))
        return (
            f"{count} of {self.seen} samples {what} ({count / self.seen:.1%}, limit {limit:.1%}), most often "
            f"because they {problem} ({self.dropped[reason]}{self._spike(reason)}), such as "
            f"{', '.join(self.examples.get(reason, []))}: {advice}"
        )

    def _spike(self, reason: str) -> str:
        if reason != "too_short" or not self.short_lengths:
            return ""
        tokens, count = self.short_lengths.most_common(1)[0]
        return f", fewer than {self.limits.min_supervised}; {count} have exactly {tokens}"
