"""report.json: what an evaluation found, in one typed object. Its presence commits the evaluation.

`Report.model_json_schema()` is its documentation. Figures at the top are those of the drafter at the
first concurrency; `contenders` has every measurement. Numbers that do not exist are null.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from dflash.evaluation import acceptance
from dflash.evaluation.acceptance import AcceptanceLength, Interval, Slice
from dflash.evaluation.answers import NONE, Answer, Question
from dflash.evaluation.equality import Equality
from dflash.evaluation.gate import Verdict

SCHEMA_VERSION = 1


class Measurement(BaseModel):
    """One contender at one concurrency."""

    model_config = ConfigDict(frozen=True)

    contender: str = Field(description="none, mtp, dflash, or a second drafter's name.")
    concurrency: int = Field(description="Requests in flight.")
    answers: int = Field(description="Answers measured, over all repeats.")
    tokens: int = Field(description="Tokens emitted, over all repeats.")
    tokens_per_second: float = Field(
        description="Tokens after the first over decoding time, times requests in flight; median of repeats."
    )
    tokens_per_second_spread: float = Field(
        description="Largest minus smallest over repeats, as a share of the median."
    )
    time_per_output_token_p50: float = Field(description="Seconds; over answers.")
    time_per_output_token_p95: float = Field(description="Seconds; over answers.")
    time_to_first_token_p50: float = Field(description="Seconds; over answers.")
    time_to_first_token_p95: float = Field(description="Seconds; over answers.")
    acceptance_length: AcceptanceLength | None = Field(None, description="null for plain decoding.")
    by_slot: list[float] | None = Field(
        None, description="Share of verifications that accepted slots 1..B-1."
    )
    histogram: list[int] | None = Field(
        None, description="Verifications by number of accepted drafts, from 0."
    )
    speedup: float | None = Field(None, description="Against none at this concurrency.")
    speedup_interval: Interval | None = Field(None, description="Its 95 % interval, over questions.")


class TrainingSummary(BaseModel):
    """How the drafter came to be, from its metrics.jsonl."""

    model_config = ConfigDict(frozen=True)

    steps: int = Field(description="Last step that was logged.")
    final: dict[str, float] = Field(description="Last value of each metric.")
    curve: list[dict[str, float]] = Field(
        description="At most 200 rows, evenly spaced, and 200 of measured acceptance; `global_step` in each."
    )


class Report(BaseModel):
    """What an evaluation found."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = Field(SCHEMA_VERSION, description="Grows when a key changes its meaning.")
    name: str = Field(description="The Drafter's name.")
    dataset: str = Field(description="Hash that names the dataset.")
    drafter: str = Field(description="Hash that names the drafter.")
    evaluation: str = Field(description="Hash that names the evaluation.")
    created_at: float = Field(description="Unix time.")

    acceptance_length: AcceptanceLength = Field(description="Tokens per verification, by each definition.")
    greedy_equal: bool | None = Field(
        description="Greedy answers equal plain decoding's, near-ties apart. null above temperature 0."
    )
    speedup: float = Field(description="Time per output token of plain decoding over the drafter's.")
    speedup_interval: Interval = Field(description="Its 95 % interval, over questions.")
    tokens_per_second: dict[str, float] = Field(description="By contender, at the first concurrency.")
    by_slot: list[float] = Field(description="Share of verifications that accepted slots 1..B-1.")
    histogram: list[int] = Field(description="Verifications by number of accepted drafts, 0 to B-1.")
    block_size: int = Field(description="B: the anchor and B - 1 drafts.")
    slices: dict[str, dict[str, Slice]] = Field(description="Acceptance by what kind of slice, then value.")
    differences: Equality | None = Field(
        description="First differences from plain decoding, with margins. null above temperature 0."
    )
    contenders: list[Measurement] = Field(description="Every contender at every concurrency.")
    gate: Verdict = Field(description="Whether it is promoted, and why.")
    diagnosis: dict[str, Any] | None = Field(
        None, description="Faults looked for in a weak drafter, and what each correction would give."
    )
    roofline: dict[str, Any] | None = Field(None, description="What bounds plain decoding on this device.")
    warnings: list[str] = Field([], description="What a reader should know before trusting the figures.")

    temperature: float = Field(description="Sampling temperature; rows of different ones are never mixed.")
    max_tokens: int = Field(description="Most tokens in one answer.")
    questions: int = Field(description="Prompts asked.")
    repeats: int = Field(description="Measurements of each contender.")
    engine: dict[str, Any] = Field(description="Name, dtype, device, versions, and flags of each contender.")
    target: dict[str, Any] = Field(description="Model, revision and fingerprint of its weights.")
    shape: dict[str, Any] = Field(
        description="The drafter's resolved shape: taps, mask token, rotary base, ..."
    )
    training: TrainingSummary | None = Field(None, description="The training curve.")
    configuration: dict[str, Any] = Field(description="The Drafter's spec, defaults applied.")

    def to_json(self) -> bytes:
        """Indented JSON; NaN and infinity become null."""
        return orjson.dumps(self.model_dump(mode="python"), option=orjson.OPT_INDENT_2)


def measure(
    contender: str,
    concurrency: int,
    answers: Sequence[Answer],
    plain: Sequence[Answer],
    *,
    block_size: int,
    wall_seconds: Sequence[float] | None = None,
) -> Measurement:
    """Figures of one contender's answers; `plain` are none's to the same questions and repeats.

    `wall_seconds`, one a repeat, give throughput where requests overlap; in process, one request at a
    time, it is the decoding time.
    """
    rates = [_rate(part, wall_seconds[r] if wall_seconds else None) for r, part in _repeats(answers).items()]
    median = statistics.median(rates)
    per_token = sorted(
        a.decode_seconds / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1 and a.decode_seconds > 0
    )
    first = sorted(a.prefill_seconds for a in answers)
    speculative = contender != NONE
    speedup, interval = (None, None)
    if speculative and plain:
        speedup, interval = _speedup(plain, answers)
    accepted = [a.accepted for a in answers]
    return Measurement(
        contender=contender,
        concurrency=concurrency,
        answers=len(answers),
        tokens=sum(len(a.tokens) for a in answers),
        tokens_per_second=median,
        tokens_per_second_spread=(max(rates) - min(rates)) / median if median else math.nan,
        time_per_output_token_p50=quantile(per_token, 0.5),
        time_per_output_token_p95=quantile(per_token, 0.95),
        time_to_first_token_p50=quantile(first, 0.5),
        time_to_first_token_p95=quantile(first, 0.95),
        acceptance_length=acceptance.acceptance_length([a.emitted for a in answers], accepted)
        if speculative
        else None,
        by_slot=acceptance.by_slot(accepted, block_size) if speculative else None,
        histogram=acceptance.histogram(accepted, block_size) if speculative else None,
        speedup=speedup,
        speedup_interval=interval,
    )


def _repeats(answers: Sequence[Answer]) -> dict[int, list[Answer]]:
    parts: dict[int, list[Answer]] = {}
    for answer in answers:
        parts.setdefault(answer.repeat, []).append(answer)
    return dict(sorted(parts.items()))


def _rate(answers: Sequence[Answer], wall: float | None) -> float:
    if wall is not None:
        return sum(len(a.tokens) for a in answers) / wall
    seconds = sum(a.decode_seconds for a in answers)
    return sum(len(a.tokens) - 1 for a in answers) / seconds if seconds else math.nan


def _speedup(plain: Sequence[Answer], answers: Sequence[Answer]) -> tuple[float | None, Interval | None]:
    """Per question: the median over repeats of the time per token, weighted by tokens."""
    base = _paired(plain)
    mine = _paired(answers)
    common = [key for key in base if key in mine and base[key][1] and mine[key][1]]
    if not common:
        return None, None
    return acceptance.speedup([base[k] for k in common], [mine[k] for k in common])


def _paired(answers: Sequence[Answer]) -> dict[str, tuple[float, int]]:
    by_question: dict[str, list[Answer]] = {}
    for answer in answers:
        by_question.setdefault(answer.sample_id, []).append(answer)
    return {
        sample: (statistics.median(a.decode_seconds for a in part), len(part[0].tokens) - 1)
        for sample, part in by_question.items()
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank quantile of an ascending list; NaN when empty."""
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def training_summary(rows: Sequence[dict[str, Any]]) -> TrainingSummary | None:
    """The curve of metrics.jsonl's rows; None when there are none."""
    numbers = [
        {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k not in ("time", "attempt")}
        for row in rows
    ]
    # What a checkpoint was measured to accept comes later than rows of later steps.
    kept = sorted((row for row in numbers if len(row) > 1), key=lambda row: row["global_step"])
    if not kept:
        return None
    measured = [row for row in kept if "eval/acceptance_length" in row]
    trained = [row for row in kept if "eval/acceptance_length" not in row]
    curve = sorted(_spaced(measured) + _spaced(trained), key=lambda row: row["global_step"])
    final: dict[str, float] = {}
    for row in kept:
        final.update(row)
    return TrainingSummary(steps=int(final["global_step"]), final=final, curve=curve)


def _spaced(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most 200 rows, evenly spaced, the last one among them."""
    return rows[::-1][:: max(1, math.ceil(len(rows) / 200))][::-1]


def losses(measurements: Sequence[Measurement]) -> list[str]:
    """A sentence for each contender that loses to plain decoding at some concurrency."""
    found = []
    for name in dict.fromkeys(m.contender for m in measurements):
        slower = {
            m.concurrency: m.speedup
            for m in measurements
            if m.contender == name and m.speedup is not None and m.speedup < 1.0
        }
        if slower:
            places = ", ".join(f"{speedup:.2f} times at {n}" for n, speedup in sorted(slower.items()))
            found.append(
                f"{name} is slower than plain decoding with so many requests in flight: {places}; serve it "
                "with fewer, or with fewer draft tokens"
            )
    return found


def warnings(
    answers: Sequence[Answer],
    slices: dict[str, dict[str, Slice]],
    *,
    trained_length: int,
    questions: dict[str, Question],
) -> list[str]:
    """Signs that the figures do not mean what they seem to."""
    found = []
    buckets = list(slices.get("context_length", slices["prompt_length"]).items())
    for name, part in buckets[1:]:
        if part.length.pooled_drafts_only < 0.5 * buckets[0][1].length.pooled_drafts_only:
            found.append(
                f"acceptance falls from {buckets[0][1].length.pooled:.2f} at context {buckets[0][0]} to "
                f"{part.length.pooled:.2f} at {name}: check the drafter's sliding window and rotary base"
            )
    longest = max((len(questions[a.sample_id].prompt_ids) + len(a.tokens) for a in answers), default=0)
    if longest > trained_length:
        found.append(
            f"answers reach position {longest:,}, but training was cut at {trained_length:,}: "
            "acceptance beyond it is not what was trained"
        )
    counts = [n for a in answers for n in a.emitted[:-1]]
    if len(counts) >= 200 and len(set(counts)) == 1:
        found.append(
            f"every one of {len(counts)} verifications emitted exactly {counts[0]} tokens: "
            "acceptance looks simulated, not measured"
        )
    return found
