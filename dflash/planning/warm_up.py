"""A warm-up: the small run that stands for the whole one, what is measured in it, and what follows. Pure.

What was measured is kept for plans, projections and the expected schedule, in the store as
`warm-ups/<name>.json` beside the outputs of the real run. Not for running it, which is `jobs.cli.warm_up`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import orjson
from pydantic import Field

from dflash.resource.drafter import DrafterSpec
from dflash.resource.evaluation import EvaluationGate
from dflash.resource.hashes import inputs_of
from dflash.resource.section import Section
from dflash.resource.storage import Tracking, Wandb
from dflash.resource.training import TrainingEvaluation

_HELD_OUT = 8
"""Prompts held out of a warm-up, about."""
_QUESTIONS = 8
_STEPS = 60
"""Optimiser steps of a warm-up, at least."""
_INTERVAL_SECONDS = 0.1
_LEAST_ROWS = 4
LEAST_ANSWERS = 20
"""Below so many answers a share says nothing."""
_LEAST_BUSY = 0.02


class Expected(Section):
    """One stage of the whole run, at the measured rates."""

    seconds: float = Field(ge=0.0, description="From its start to its end, start-up included.")
    startup_seconds: float = Field(0.0, ge=0.0, description="Of it, until the first unit of work was done.")
    gpus: float = Field(ge=0.0, description="GPUs held meanwhile.")


class WarmUp(Section):
    """Rates of one process each, amounts a sample, and what follows for the whole run."""

    settings: str = Field(description="Digest of what was measured; see `settings_of`.")
    device: str = Field(description="What it was measured on.")
    answers: float = Field(ge=0.0, description="Answers generated for it.")
    dropped_share: float = Field(ge=0.0, le=1.0, description="Of these, dropped by the gate.")
    prompt_tokens: float = Field(ge=0.0, description="Mean, of a kept sample.")
    response_tokens: float = Field(ge=0.0, description="Mean, of a kept sample.")
    generation: float | None = Field(None, gt=0.0, description="Answer tokens per second of one worker.")
    target: float | None = Field(None, gt=0.0, description="Tokens per second that one target can serve.")
    drafter: float | None = Field(None, gt=0.0, description="Tokens per second that one drafter can train.")
    steps_per_second: float | None = Field(None, gt=0.0, description="Of the declared fleet.")
    stages: dict[str, Expected] = Field({}, description="Of the whole run, by name of the stage.")

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        return sum(stage.seconds * stage.gpus for stage in self.stages.values()) / 3600


def settings_of(spec: DrafterSpec) -> str:
    """Digest of what rates depend on: model, generation, drafter, training and the fleet, not the prompts."""
    parts = {
        "target": inputs_of(spec.target),
        "generation": inputs_of(spec.generation),
        "drafter": inputs_of(spec.drafter),
        "training": inputs_of(spec.training),
        "fleet": [spec.generation.replicas, spec.training.targets, spec.training.drafters],
        "devices": spec.training.target_devices,
        "window": [spec.training.queue_depth, spec.training.micro_batch_tokens],
        "packed": spec.training.target_batch_tokens,
    }
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def shrunk(spec: DrafterSpec, prompts: int, mark: str) -> DrafterSpec:
    """The same Drafter with the first `prompts` prompts; models, lengths, batch, precision and fleet stay.

    Epochs are as many as give some steps to time; nothing is refused or promoted for its quality; a failure
    is final, so that it is told at once. `mark` tells one warm-up's outputs from another's.
    """
    training, generation = spec.training, spec.generation
    held_out = min(0.5, max(spec.prompts.hold_out, _HELD_OUT / prompts))
    kept = max(1.0, prompts * (1.0 - held_out))
    return spec.model_copy(
        update={
            "rerun": mark,
            "suspend": False,
            "prompts": spec.prompts.model_copy(update={"limit": prompts, "hold_out": held_out}),
            "generation": generation.model_copy(
                update={
                    "gate": generation.gate.model_copy(
                        update={
                            "max_dropped_share": 1.0,
                            "max_empty_share": 1.0,
                            "max_repetition_share": 1.0,
                        }
                    )
                }
            ),
            "training": training.model_copy(
                update={
                    "epochs": max(1, math.ceil(_STEPS * training.batch_size / kept)),
                    "evaluation": TrainingEvaluation(),
                    "max_restarts": 0,
                }
            ),
            "evaluation": spec.evaluation.model_copy(
                update={
                    "samples": min(spec.evaluation.samples, _QUESTIONS),
                    "repeats": 1,
                    "gate": EvaluationGate(),
                }
            ),
            "tracking": Tracking(wandb=Wandb(enabled=False), interval_seconds=_INTERVAL_SECONDS),
        }
    )


def least_prompts(spec: DrafterSpec) -> int:
    """Prompts of the first round: two global batches, and some to hold out."""
    return 2 * spec.training.batch_size + _HELD_OUT


@dataclass(frozen=True)
class Timed:
    """One stage of a warm-up. `work` is units a second, start-up left out."""

    seconds: float
    work: float
    units: float

    @property
    def startup(self) -> float:
        """Seconds before the first unit, and after the last."""
        return max(0.0, self.seconds - self.units / self.work) if self.work else self.seconds

    def expected(self, units: float, gpus: float) -> Expected:
        """The stage with so many units in place of these."""
        seconds = self.startup + (units / self.work if self.work else 0.0)
        return Expected(seconds=seconds, startup_seconds=self.startup, gpus=gpus)


@dataclass(frozen=True)
class Pace:
    """Training as its rows have it, without the first of them: start-up, compilation."""

    steps_per_second: float
    target: float | None
    drafter: float
    target_idle: float | None
    drafter_wait: float
    targets: int
    skipped: float
    bad_replies: float


def pace(rows: Sequence[Mapping[str, Any]], world: int) -> Pace | None:
    """From the rows of metrics.jsonl; None where there are too few to say anything."""
    rows = [row for row in rows if "drafter/tokens_per_second" in row]
    if len(rows) < _LEAST_ROWS:
        return None
    first, last = rows[0], rows[-1]
    settled = rows[max(1, len(rows) // 4) :]
    seconds = last["time"] - first["time"]
    wait = fmean(row["drafter/wait_share"] for row in settled)
    shares = [row["target/idle_share"] for row in settled if row.get("target/idle_share") is not None]
    idle = fmean(shares) if shares else None
    tokens = fmean(row["drafter/tokens_per_second"] for row in settled)
    targets = max(1, round(fmean(row["target/live"] for row in settled)))
    return Pace(
        steps_per_second=(last["global_step"] - first["global_step"]) / seconds,
        target=None if idle is None else tokens / targets / max(_LEAST_BUSY, 1.0 - idle),
        drafter=tokens / world / max(_LEAST_BUSY, 1.0 - wait),
        target_idle=idle,
        drafter_wait=wait,
        targets=targets,
        skipped=last["progress/skipped_steps"],
        bad_replies=last["channel/bad_replies"],
    )


def objections(spec: DrafterSpec, measured: WarmUp, training: Pace) -> list[str]:
    """Why the whole run should not be started as it is declared, a sentence each with its remedy."""
    found = []
    gate, tracking = spec.generation.gate, spec.tracking
    cost = measured.gpu_hours * (tracking.gpu_hour_price or 0.0)
    if tracking.cost_limit is not None and cost > tracking.cost_limit:
        found.append(
            f"the whole run is foretold to cost {cost:,.2f}, and tracking.costLimit is "
            f"{tracking.cost_limit:,.2f}; give fewer prompts or epochs, or see what `dflash plan` recommends"
        )
    if measured.dropped_share > gate.max_dropped_share and measured.answers >= LEAST_ANSWERS:
        found.append(
            f"{measured.dropped_share:.0%} of {measured.answers:.0f} answers were dropped, and the gate "
            f"stops at {gate.max_dropped_share:.0%}; look at the chat template, generation.maxTokens and "
            "sampling"
        )
    if training.skipped:
        found.append(
            f"{training.skipped:.0f} steps had a gradient that is not finite; lower training.learningRate"
        )
    if training.bad_replies:
        found.append(
            f"{training.bad_replies:.0f} replies with hidden states were refused; the drafter's log has the "
            "cause"
        )
    return found
