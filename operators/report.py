"""From one look and its plan to the `status` of a Drafter, and to the events that tell of transitions.

Pure. What is unchanged keeps its bytes, so that comparing with the old status says whether anything
needs to be written; times are those of transitions, never of the look.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import TypeAdapter

from dflash.planning.spending import Projection, Spending, StageSpending
from dflash.progress import Progress
from operators.conditions import Condition, Summary
from operators.kube import Object, timestamp
from operators.observed import STAGES, Failure, Observed, Record, Stage, hash_of
from operators.plan import current_stage

_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class Event:
    """Something to tell in `kubectl describe`."""

    kind: str
    reason: str
    message: str


def record_of(status: Object) -> Record:
    """What the planner wrote down before; an empty record where there is none."""
    text = status.get("record")
    return _RECORD.validate_json(text) if text else Record()


def with_record(status: Object, record: Record) -> Object:
    """The status with the planner's memory replaced."""
    return {**status, "record": _RECORD.dump_json(record).decode()}


def status_of(
    old: Object,
    generation: int,
    *,
    seen: Observed,
    summary: Summary,
    progress: Mapping[Stage, Progress],
    spending: Spending,
    projection: Projection,
) -> Object:
    """The whole status, but for the record."""
    stage = current_stage(seen)
    at_work = progress.get(stage) if stage else None
    training = seen.record.roles.get("drafter")
    lost = list(seen.record.roles.values())
    new: Object = {
        "observedGeneration": generation,
        "stage": stage or "done",
        "phase": summary.phase,
        "message": summary.message[:2048],
        "stages": [_stage(name, seen, summary, stage, spending) for name in STAGES],
        "attempt": training.attempt if training else 0,
        "restarts": sum(r.restarts for r in lost),
        "disruptions": sum(r.disruptions for r in lost),
        "conditions": conditions(old, summary.conditions, generation, seen.now),
    }
    if spending.gpu_seconds > 0:
        new["cost"] = _cost(projection)
    if at_work is not None:
        new["progress"] = _progress(at_work)
        if at_work.alerts:
            new["alerts"] = [sentence[:512] for sentence in at_work.alerts[:16]]
        verdict = at_work.figures.get("verdict")
        if isinstance(verdict, str):
            new["verdict"] = verdict[:1024]
    if seen.committed.acceptance_length is not None:
        new["acceptanceLength"] = f"{seen.committed.acceptance_length:.2f}"
    if seen.committed.export:
        uri = f"{seen.spec.storage.uri.rstrip('/')}/drafters/{seen.hashes.drafter}/export/"
        new["artifact"] = {"uri": uri, "promoted": seen.committed.promoted}
    if summary.failure is not None:
        new["lastFailure"] = _failure(summary.failure)
    elif old.get("lastFailure"):
        new["lastFailure"] = old["lastFailure"]
    return new


def refused_status(old: Object, generation: int, summary: Summary, now: float) -> Object:
    """The status of a spec that cannot be taken; what was known of the work before is kept."""
    return {
        **old,
        "observedGeneration": generation,
        "phase": summary.phase,
        "message": summary.message[:2048],
        "conditions": conditions(old, summary.conditions, generation, now),
    }


def conditions(old: Object, new: Iterable[Condition], generation: int, now: float) -> list[Object]:
    """Conditions as the API has them; the time of transition moves only when the status does."""
    before = {c["type"]: c for c in old.get("conditions", [])}
    result = []
    for condition in new:
        known = before.get(condition.type)
        same = known is not None and known["status"] == condition.status
        result.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message[:4096],
                "lastTransitionTime": known["lastTransitionTime"] if known and same else _time(now),
                "observedGeneration": generation,
            }
        )
    return result


def merge_patch(old: Object, new: Object) -> Object:
    """A merge patch from the old status to the new; empty when they are equal. Lists go whole."""
    patch: Object = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, dict) and isinstance(old[key], dict):
            inner = merge_patch(old[key], value)
            if inner:
                patch[key] = inner
        elif old[key] != value:
            patch[key] = value
    return patch


def events(old: Object, new: Object) -> list[Event]:
    """One event for each condition that turned True or whose reason of failure changed, and each failure."""
    before = {c["type"]: c for c in old.get("conditions", [])}
    told = []
    for condition in new["conditions"]:
        known = before.get(condition["type"], {"status": "Unknown", "reason": ""})
        turned = known["status"] != condition["status"]
        if condition["status"] == "True" and condition["type"] == "Stalled":
            if turned or known["reason"] != condition["reason"]:
                told.append(Event("Warning", condition["reason"], condition["message"]))
        elif (
            condition["status"] == "True" and condition["type"] not in ("Reconciling", "Accepted") and turned
        ):
            told.append(Event("Normal", condition["type"], condition["message"] or condition["reason"]))
        elif condition["type"] == "Accepted" and condition["status"] == "False" and turned:
            told.append(Event("Warning", condition["reason"], condition["message"]))
        elif (
            condition["type"] == "Reconciling" and known["reason"] != condition["reason"] and known["reason"]
        ) and condition["status"] == "True":
            told.append(Event("Normal", condition["reason"], condition["message"] or condition["reason"]))
    failure = new.get("lastFailure")
    if failure and failure != old.get("lastFailure"):
        where = f"{failure['role']} {failure['index']}, attempt {failure['attempt']}"
        told.append(Event("Warning", failure["reason"], f"{where}: {failure['message']}"))
    return told


def _stage(
    name: Stage, seen: Observed, summary: Summary, current: Stage | None, spending: Spending
) -> Object:
    output = {
        "generation": hash_of("generate", seen.hashes),
        "training": hash_of("drafter", seen.hashes),
        "evaluation": hash_of("evaluate", seen.hashes),
    }[name]
    if current is None or STAGES.index(name) < STAGES.index(current) or seen.committed.has(name):
        state = "Done"
    elif name != current:
        state = "Waiting"
    else:
        state = {
            "Suspended": "Suspended",
            "Stalled": "Stalled",
            "Queued": "Pending",
            "Pending": "Pending",
        }.get(summary.phase, "Running")
    spent = spending.stages.get(name, StageSpending())
    return {
        "name": name,
        "hash": output,
        "state": state,
        "gpuSeconds": int(spent.gpu_seconds),
        "wastedGpuSeconds": int(spent.wasted_gpu_seconds),
    }


def spending_of(status: Object) -> Spending:
    """GPU time as a status has it."""
    stages = {
        s["name"]: StageSpending(
            gpu_seconds=s.get("gpuSeconds", 0), wasted_gpu_seconds=s.get("wastedGpuSeconds", 0)
        )
        for s in status.get("stages", [])
    }
    return Spending(stages=stages)


def _cost(projection: Projection) -> Object:
    """Only what is known."""
    amounts = {
        "spentGpuHours": projection.spent_gpu_hours,
        "wastedGpuHours": projection.wasted_gpu_hours,
        "projectedGpuHours": projection.gpu_hours,
        "spent": projection.spent,
        "wasted": projection.wasted,
        "projected": projection.cost,
    }
    told: Object = {name: f"{amount:.2f}" for name, amount in amounts.items() if amount is not None}
    if projection.ends_at is not None:
        told |= {"endsAt": _time(60 * round(projection.ends_at / 60)), "through": projection.through}
    return told


def _progress(progress: Progress) -> Object:
    percent = f"{100 * progress.done / progress.total:.0f} %" if progress.total else ""
    counted = f"{progress.done:.0f}/{progress.total:.0f}" if progress.total else f"{progress.done:.0f}"
    told: Object = {
        "summary": percent or counted,
        "message": progress.message[:256],
        "done": int(progress.done),
        "total": int(progress.total),
        "unit": progress.unit[:32],
        "updatedAt": _time(progress.updated_at),
        "figures": {key[:64]: _figure(value) for key, value in list(progress.figures.items())[:64]},
    }
    if progress.eta_seconds is not None and math.isfinite(progress.eta_seconds):
        told["etaSeconds"] = max(0, int(progress.eta_seconds))
    return told


def _figure(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else value[:256]


def _failure(failure: Failure) -> Object:
    told: Object = {
        "reason": failure.reason,
        "role": failure.role,
        "index": failure.index,
        "attempt": failure.attempt,
        "node": failure.node,
        "message": failure.message[:2048],
        "time": _time(failure.at),
    }
    if failure.exit_code is not None:
        told["exitCode"] = failure.exit_code
    return told


def _time(when: float) -> str:
    return timestamp(datetime.fromtimestamp(when, UTC))
