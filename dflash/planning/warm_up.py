"""What a warm-up measured, as it is kept for plans, projections and the expected schedule.

In the store as `warm-ups/<name>.json`, beside the outputs of the real run. Not for running a warm-up, which
is `jobs.cli.warm_up`.
"""

import hashlib

import orjson
from pydantic import Field

from dflash.resource.drafter import DrafterSpec
from dflash.resource.hashes import inputs_of
from dflash.resource.section import Section


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


def settings_of(spec: DrafterSpec) -> str:
    """Digest of what rates depend on: model, generation, drafter, training and the fleet, not the prompts."""
    parts = {
        "target": inputs_of(spec.target),
        "generation": inputs_of(spec.generation),
        "drafter": inputs_of(spec.drafter),
        "training": inputs_of(spec.training),
        "fleet": [spec.generation.replicas, spec.training.targets, spec.training.drafters],
        "window": [spec.training.queue_depth, spec.training.micro_batch_tokens],
        "packed": spec.training.target_batch_tokens,
    }
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
