"""The promotion gate: from a report's figures to pass or fail, a sentence, and what to try.

A failed gate is a result, not an error: the stage is done and the drafter is not promoted.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from dflash import layout
from dflash.errors import TemporaryError
from dflash.resource.evaluation import EvaluationGate

if TYPE_CHECKING:  # what judges needs numpy; the operator, which only promotes, has none
    from dflash.evaluation.acceptance import Slice
    from dflash.storage.store import Store

log = logging.getLogger(__name__)

_SWAPS = 20


class Verdict(BaseModel):
    """What the gate says."""

    model_config = ConfigDict(frozen=True)

    passed: bool = Field(description="Whether the drafter may be promoted.")
    reason: str = Field(description="One sentence.")
    advice: str = Field("", description="What to try, when it failed.")


@dataclass(frozen=True)
class Evidence:
    """What the gate judges by, and what explains a failure.

    `speedup` is None where it was not measured, `divergences` where outputs were not compared.
    `diagnosis` is a fault found in the drafter, `gap` a slice that does much worse than another.
    """

    acceptance_length: float
    speedup: float | None
    divergences: int | None
    diagnosis: str = ""
    gap: str = ""
    training_accuracy: float | None = None


def judge(gate: EvaluationGate, evidence: Evidence) -> Verdict:
    """Apply the gate."""
    length, speedup, divergences = evidence.acceptance_length, evidence.speedup, evidence.divergences
    passes, failures = [], []
    if divergences:
        failures.append(f"{divergences} greedy answers differ from plain decoding by more than a near-tie")
    elif divergences == 0:
        passes.append("greedy outputs equal plain decoding's")
    if (least := gate.min_acceptance_length) is not None:
        if length >= least:
            passes.append(f"acceptance length {length:.2f} is at least {least:g}")
        else:
            failures.append(f"acceptance length {length:.2f} is below {least:g}")
    if (least := gate.min_speedup) is not None:
        if speedup is None:
            failures.append("speed-up was not measured")
        elif speedup >= least:
            passes.append(f"speed-up {speedup:.2f} is at least {least:g}")
        else:
            failures.append(f"speed-up {speedup:.2f} is below {least:g}")
    if failures:
        return Verdict(passed=False, reason="; ".join(failures) + ".", advice=_advice(gate, evidence))
    return Verdict(passed=True, reason=("; ".join(passes) or "the gate has no limits") + ".")


def _advice(gate: EvaluationGate, evidence: Evidence) -> str:
    """The likeliest cause first: an engine fault, a drafter fault, a mismatch of data, too little of it."""
    if evidence.divergences:
        return (
            "The verifying engine changes outputs, which no drafter can cause: check its version and "
            "attention backend, and run once more with evaluation.dtype float32."
        )
    if evidence.diagnosis:
        return evidence.diagnosis
    length, least = evidence.acceptance_length, gate.min_acceptance_length
    if least is not None and not length >= least:
        accuracy = evidence.training_accuracy
        if accuracy is not None and accuracy > 0.5 and length < 1.3:
            return (
                f"Training accuracy was {accuracy:.2f} but almost nothing is accepted: the drafter is served "
                "otherwise than it was trained; compare taps, mask token, rotary base and in-block causality."
            )
        return evidence.gap or "Train on more prompts, or for more epochs; acceptance grows with both."
    return (
        "Drafts are accepted but time is not saved: see the roofline; try fewer layers or less concurrency."
    )


_GAP = 0.5
_GAP_VERIFICATIONS = 100


def largest_gap(slices: "Mapping[str, Mapping[str, Slice]]") -> str:
    """A sentence when one kind of prompt accepts less than half the drafts of another; else "".

    A drafter trained in one language or thinking mode does poorly in another: data, not training, is
    what is missing then.
    """
    worst, sentence = _GAP, ""
    for kind in ("thinking", "tools", "language", "prompt_set", "group"):
        parts = {
            value: part.length
            for value, part in slices.get(kind, {}).items()
            if part.length.verifications >= _GAP_VERIFICATIONS
        }
        if len(parts) < 2:
            continue
        low = min(parts, key=lambda v: parts[v].pooled)
        high = max(parts, key=lambda v: parts[v].pooled)
        ratio = parts[low].pooled_drafts_only / max(parts[high].pooled_drafts_only, 1e-9)
        if ratio < worst:
            worst = ratio
            sentence = (
                f"Acceptance is {parts[low].pooled:.2f} for {kind} {low} and {parts[high].pooled:.2f} for "
                f"{high}: add training prompts of {kind} {low}, in the mode that is served."
            )
    return sentence


def promote(
    store: "Store", name: str, *, drafter: str, evaluation: str, report_sha256: str, acceptance_length: float
) -> dict[str, Any]:
    """Point `promoted/<name>.json` at a drafter whose report passed, by compare-and-swap.

    Gives what was written. TemporaryError when others keep winning the swap.
    """
    wanted = {
        "drafter": drafter,
        "export": layout.export(drafter),
        "evaluation": evaluation,
        "report": layout.report(evaluation),
        "report_sha256": report_sha256,
        "acceptance_length": acceptance_length,
    }
    key = layout.promoted(name)
    for _ in range(_SWAPS):
        current, etag = store.read(key) if store.exists(key) else (b"{}", None)
        held: dict[str, Any] = orjson.loads(current)
        if {k: held.get(k) for k in wanted} == wanted:
            return held
        document = {**wanted, "promoted_at": time.time(), "replaces": held.get("drafter")}
        if store.swap(key, orjson.dumps(document, option=orjson.OPT_INDENT_2), etag) is not None:
            log.info("%s now names drafter %s", key, drafter)
            return document
        time.sleep(0.05)
    raise TemporaryError(f"{key} was changed by others {_SWAPS} times while promoting; run again")
