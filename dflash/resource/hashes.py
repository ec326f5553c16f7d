"""Names of the stages' outputs: each a hash of everything that can change it, in one chain.

dataset = H(target, prompt content, generation inputs)
drafter = H(dataset, drafter, training inputs)
evaluation = H(drafter, evaluation inputs)

Operational fields (replicas, placement, limits, deadlines) are left out, so scaling a run never
throws its work away. `spec.rerun` enters at the head of the chain.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from dflash.resource.drafter import DrafterSpec
from dflash.resource.section import OPERATIONAL, Section

HASH_LENGTH = 16
"""Hex digits kept: 64 bits, so a clash among a million runs has odds of 1 in 37 million."""


@dataclass(frozen=True)
class StageHashes:
    """The names of the three outputs that a spec asks for."""

    dataset: str
    drafter: str
    evaluation: str


def inputs_of(section: Section) -> dict[str, Any]:
    """The fields of a section that are inputs, in file spelling, operational ones left out."""
    inputs: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get(OPERATIONAL):
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            value = inputs_of(value)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            value = [inputs_of(item) for item in value]
        inputs[field.alias or name] = value
    return inputs


def digest(inputs: dict[str, Any]) -> str:
    """Hash of inputs, independent of key order."""
    text = orjson.dumps(inputs, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return hashlib.sha256(text).hexdigest()[:HASH_LENGTH]


def stage_inputs(
    spec: DrafterSpec, *, prompts: str, target: str, evaluation_prompts: str = ""
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What each stage's hash is made of, as written to its `inputs.json`.

    `prompts` and `evaluation_prompts` are fingerprints of the prompt files' content; `target` is
    the fingerprint of a local model folder, or "" where model and revision say it all.
    """
    prompt_inputs = inputs_of(spec.prompts)
    del prompt_inputs["uri"]  # content counts, not where it lies
    dataset = {
        "target": {**inputs_of(spec.target), "content": target},
        "prompts": {**prompt_inputs, "content": prompts},
        "generation": inputs_of(spec.generation),
        "minSupervisedTokens": spec.generation.gate.min_supervised_tokens or 2 * spec.drafter.block_size,
        "rerun": spec.rerun,
    }
    drafter = {
        "dataset": digest(dataset),
        "drafter": inputs_of(spec.drafter),
        "training": inputs_of(spec.training),
    }
    evaluation = {
        "drafter": digest(drafter),
        "evaluation": {**inputs_of(spec.evaluation), "content": evaluation_prompts},
    }
    return dataset, drafter, evaluation


def stage_hashes(
    spec: DrafterSpec, *, prompts: str, target: str, evaluation_prompts: str = ""
) -> StageHashes:
    """The names of the outputs; arguments as for `stage_inputs`."""
    dataset, drafter, evaluation = stage_inputs(
        spec, prompts=prompts, target=target, evaluation_prompts=evaluation_prompts
    )
    return StageHashes(digest(dataset), digest(drafter), digest(evaluation))
