"""Acceptance statistics, from answers alone. Pure: no model, no store, no clock.

Two lengths are in use and both are given, always with the bonus token unless named otherwise:
pooled is all tokens over all verifications, the one that decides speed; the per-response mean
averages each response's own length, the one most papers print. Drafts-only figures are one less.
Intervals are 95 %, over responses, since verifications of one response are not independent.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dflash.evaluation.answers import Answer, Question

_STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_PROMPT_LENGTHS = (256, 1024, 4096, 16384)
_POSITIONS = (64, 256, 1024, 4096, 16384)


class Interval(BaseModel):
    """A 95 % confidence interval."""

    model_config = ConfigDict(frozen=True)

    low: float
    high: float


class AcceptanceLength(BaseModel):
    """Tokens per verification, by each definition in use."""

    model_config = ConfigDict(frozen=True)

    pooled: float = Field(description="All tokens over all verifications; bonus included.")
    pooled_interval: Interval | None = Field(description="Its 95 % interval; null for a single response.")
    per_response_mean: float = Field(description="Mean over responses of each one's; bonus included.")
    per_response_interval: Interval | None = Field(
        description="Its 95 % interval; null for a single response."
    )
    pooled_drafts_only: float = Field(description="Accepted drafts over verifications: no bonus.")
    per_response_mean_drafts_only: float = Field(description="Mean over responses; no bonus.")
    pooled_with_first_token: float = Field(
        description="SGLang's count: (tokens + 1 a response, the prefill's) over verifications."
    )
    responses: int = Field(description="Answers with at least one verification.")
    tokens: int = Field(description="Tokens emitted by verifications.")
    verifications: int = Field(description="Target passes after the prefill.")


class Slice(BaseModel):
    """Acceptance on a part of the answers."""

    model_config = ConfigDict(frozen=True)

    length: AcceptanceLength
    by_slot: list[float] = Field(description="As in the report, for this part.")


def acceptance_length(rounds: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]) -> AcceptanceLength:
    """The lengths of some answers.

    `rounds`: tokens emitted per verification, one sequence a response; `accepted`: of these, drafts.
    Responses without a verification (ended by the prefill's token) have no acceptance and are left out.
    """
    kept = [i for i, r in enumerate(rounds) if len(r)]
    tokens = np.array([sum(rounds[i]) for i in kept], dtype=np.float64)
    drafts = np.array([sum(accepted[i]) for i in kept], dtype=np.float64)
    verifications = np.array([len(rounds[i]) for i in kept], dtype=np.float64)
    if not kept:
        return AcceptanceLength(
            pooled=math.nan,
            pooled_interval=None,
            per_response_mean=math.nan,
            per_response_interval=None,
            pooled_drafts_only=math.nan,
            per_response_mean_drafts_only=math.nan,
            pooled_with_first_token=math.nan,
            responses=0,
            tokens=0,
            verifications=0,
        )
    means = tokens / verifications
    return AcceptanceLength(
        pooled=float(tokens.sum() / verifications.sum()),
        pooled_interval=ratio_interval(tokens, verifications),
        per_response_mean=float(means.mean()),
        per_response_interval=ratio_interval(means, np.ones_like(means)),
        pooled_drafts_only=float(drafts.sum() / verifications.sum()),
        per_response_mean_drafts_only=float((drafts / verifications).mean()),
        pooled_with_first_token=float((tokens.sum() + len(kept)) / verifications.sum()),
        responses=len(kept),
        tokens=int(tokens.sum()),
        verifications=int(verifications.sum()),
    )


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> Interval | None:
    """95 % interval of sum(numerators) / sum(denominators) over independent pairs, float64 [n] each.

    The ratio's variance by linearisation (Cochran, Sampling Techniques, 6.3), Student's t with n - 1
    degrees of freedom. None for a single pair, which says nothing of the spread.
    """
    count = len(numerators)
    if count < 2:
        return None
    ratio = float(numerators.sum() / denominators.sum())
    residuals = numerators - ratio * denominators
    variance = count / (count - 1) * float((residuals**2).sum()) / float(denominators.sum()) ** 2
    half = _student(count - 1) * math.sqrt(variance)
    return Interval(low=ratio - half, high=ratio + half)


def _student(freedom: int) -> float:
    """0.975 quantile of Student's t: a table, then the Cornish-Fisher expansion around the normal's."""
    if freedom <= len(_STUDENT_975):
        return _STUDENT_975[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def by_slot(accepted: Iterable[Sequence[int]], block_size: int) -> list[float]:
    """For slots 1..B-1, the share of verifications in which that slot's draft was accepted.

    A slot is accepted only if all before it were, so the list falls, and its sum is the pooled
    drafts-only length.
    """
    counts = histogram(accepted, block_size)
    total = sum(counts)
    reached = [sum(counts[k:]) for k in range(1, block_size)]
    return [r / total if total else math.nan for r in reached]


def histogram(accepted: Iterable[Sequence[int]], block_size: int) -> list[int]:
    """Verifications by number of accepted drafts, 0 to B-1. (Accepted drafts never exceed B-1.)"""
    counts = [0] * block_size
    for response in accepted:
        for n in response:
            counts[n] += 1
    return counts


def slices(
    answers: Sequence[Answer], questions: dict[str, Question], block_size: int
) -> dict[str, dict[str, Slice]]:
    """Acceptance by prompt set, group, language, thinking, tools, prompt length and position in the output.

    Positions only where the engine tells verifications in order.
    """
    keys: dict[str, Callable[[Answer], str]] = {
        "prompt_set": lambda a: questions[a.sample_id].prompt_set,
        "group": lambda a: questions[a.sample_id].group,
        "language": lambda a: questions[a.sample_id].language,
        "thinking": lambda a: "on" if questions[a.sample_id].thinking else "off",
        "tools": lambda a: "on" if questions[a.sample_id].tools else "off",
        "prompt_length": lambda a: _bucket(len(questions[a.sample_id].prompt_ids), _PROMPT_LENGTHS),
    }
    found: dict[str, dict[str, Slice]] = {}
    for name, key in keys.items():
        parts: dict[str, list[tuple[list[int], list[int]]]] = {}
        for answer in answers:
            parts.setdefault(key(answer), []).append((answer.emitted, answer.accepted))
        parts.pop("", None)
        found[name] = {value: _slice(part, block_size) for value, part in sorted(parts.items(), key=_order)}
    if not all(answer.ordered for answer in answers):
        return found
    found["output_position"] = _by_position(answers, block_size, lambda _: 0, _POSITIONS)
    found["context_length"] = _by_position(
        answers, block_size, lambda a: len(questions[a.sample_id].prompt_ids), _PROMPT_LENGTHS
    )
    return found


def _by_position(
    answers: Sequence[Answer], block_size: int, origin: Callable[[Answer], int], limits: Sequence[int]
) -> dict[str, Slice]:
    """Verifications sorted by where they start, counted from `origin`; one part of a response a bucket."""
    parts: dict[str, list[tuple[list[int], list[int]]]] = {}
    for answer in answers:
        position = origin(answer) + 1
        mine: dict[str, tuple[list[int], list[int]]] = {}
        for emitted, accepted in zip(answer.emitted, answer.accepted, strict=True):
            rounds, drafts = mine.setdefault(_bucket(position, limits), ([], []))
            rounds.append(emitted)
            drafts.append(accepted)
            position += emitted
        for bucket, part in mine.items():
            parts.setdefault(bucket, []).append(part)
    return {bucket: _slice(part, block_size) for bucket, part in sorted(parts.items(), key=_order)}


def _slice(parts: list[tuple[list[int], list[int]]], block_size: int) -> Slice:
    accepted = [drafts for _, drafts in parts]
    return Slice(
        length=acceptance_length([rounds for rounds, _ in parts], accepted),
        by_slot=by_slot(accepted, block_size),
    )


def _bucket(length: int, limits: Sequence[int]) -> str:
    low = 0
    for limit in limits:
        if length < limit:
            return f"{low}-{limit - 1}"
        low = limit
    return f"{low}+"


def _order(item: tuple[str, object]) -> tuple[int, str]:
    """Buckets by their lower bound, names by the alphabet."""
    low = item[0].rstrip("+").split("-")[0]
    return (int(low) if low.isdigit() else -1, item[0])


def speedup(
    plain: Sequence[tuple[float, int]],
    contender: Sequence[tuple[float, int]],
    *,
    seed: int = 0,
    draws: int = 1000,
) -> tuple[float, Interval]:
    """Time per output token without speculation over that with it, and its 95 % interval.

    Each pair is (decode seconds, tokens decoded) of one question, the same question at the same place
    in both. The interval is the percentile bootstrap over questions, both sides drawn together.
    """
    a = np.array(plain, dtype=np.float64).reshape(-1, 2)
    b = np.array(contender, dtype=np.float64).reshape(-1, 2)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} plain answers against {len(b)}: measure the same questions")
    picks = np.random.default_rng(seed).integers(0, len(a), size=(draws, len(a)))
    sums_a, sums_b = a[picks].sum(axis=1), b[picks].sum(axis=1)
    ratios = (sums_a[:, 0] / sums_a[:, 1]) / (sums_b[:, 0] / sums_b[:, 1])
    total_a, total_b = a.sum(axis=0), b.sum(axis=0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return (
        float((total_a[0] / total_a[1]) / (total_b[0] / total_b[1])),
        Interval(low=float(low), high=float(high)),
    )
