"""What is told about a Drafter: conditions, phase and one sentence, all from one look at the world.

Pure. kstatus tests Reconciling, then Stalled, then Ready; exactly one of them is True unless the
Drafter is suspended. `Ready=True` means that the drafter for *this* spec is made, measured, let
through by its gate and promoted.

| condition | True | False |
|---|---|---|
| Accepted | Valid | Invalid: the sentence names field and remedy |
| DatasetReady, Trained, Evaluated | Committed | Pending, Running, Backoff, or the reason of the failure |
| Suspended | Suspended: nothing runs; Stopping: it is being ended | NotSuspended |
| Reconciling | Generating, Training, Evaluating, Promoting, Backoff, Finishing, Obsolete, Resized | Done |
| Stalled | ConfigurationError, OOMKilled, a spent budget (RestartsExhausted, ...), GateFailed | Progressing |
| Ready | Promoted | the reason why not yet |
"""

from dataclasses import dataclass
from typing import Literal

from operators.actions import Promote, Start, StopGroup, Wait
from operators.observed import STAGE_OF, STAGES, Failure, Observed, Record, Role, Stage
from operators.plan import QUEUED, Plan, current_stage, told

Status = Literal["True", "False", "Unknown"]
Phase = Literal[
    "Pending", "Queued", "Generating", "Training", "Evaluating", "Promoting", "Ready", "Suspended", "Stalled"
]

_CONDITION: dict[Stage, str] = {
    "generation": "DatasetReady",
    "training": "Trained",
    "evaluation": "Evaluated",
}
_ING: dict[Stage, Phase] = {"generation": "Generating", "training": "Training", "evaluation": "Evaluating"}
_ROLES: dict[Stage, tuple[Role, ...]] = {
    "generation": ("generate",),
    "training": ("drafter", "target"),
    "evaluation": ("evaluate",),
}


@dataclass(frozen=True)
class Condition:
    """One condition, without its time of transition, which is the writer's to keep."""

    type: str
    status: Status
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Summary:
    """All that is told."""

    phase: Phase
    message: str
    conditions: tuple[Condition, ...]
    failure: Failure | None


def summarize(seen: Observed, decided: Plan) -> Summary:
    """What is told after a look and its plan."""
    stage = current_stage(seen)
    stalled, why = _stalled(seen, decided.record, stage)
    doing, sentence = _doing(seen, decided, stage)
    ready = stage is None and seen.committed.promoted and not seen.committed.gate
    suspended = seen.spec.suspend
    if ready:
        phase: Phase = "Ready"
        sentence = "the drafter for this spec is promoted"
    elif suspended:
        phase = "Suspended"
    elif stalled:
        phase, sentence = "Stalled", why
    elif stage is None:
        phase = "Promoting"
    else:
        phase = _phase(seen, stage)
    reconciling = not (ready or stalled or suspended) or (suspended and bool(decided.actions))
    conditions = [Condition("Accepted", "True", "Valid")]
    conditions += [_stage(seen, decided, s, stage) for s in STAGES]
    conditions += [
        Condition("Suspended", "True", "Stopping" if decided.actions else "Suspended", "spec.suspend is true")
        if suspended
        else Condition("Suspended", "False", "NotSuspended"),
        Condition("Reconciling", "True", doing, sentence)
        if reconciling
        else Condition("Reconciling", "False", "Done"),
        Condition("Stalled", "True", stalled, why)
        if stalled and not suspended and not ready
        else Condition("Stalled", "False", "Progressing"),
        Condition("Ready", "True", "Promoted", sentence)
        if ready
        else Condition("Ready", "False", "Suspended" if suspended else stalled or doing, sentence),
    ]
    return Summary(phase, sentence, tuple(conditions), _last_failure(decided.record))


def refused(message: str) -> Summary:
    """What is told of a spec that cannot be taken: nothing is observed, nothing is started."""
    unknown = [Condition(name, "Unknown", "Invalid") for name in _CONDITION.values()]
    return Summary(
        "Stalled",
        message,
        (
            Condition("Accepted", "False", "Invalid", message),
            *unknown,
            Condition("Suspended", "Unknown", "Invalid"),
            Condition("Reconciling", "False", "Invalid"),
            Condition("Stalled", "True", "Invalid", message),
            Condition("Ready", "False", "Invalid", message),
        ),
        None,
    )


def _stage(seen: Observed, decided: Plan, stage: Stage, current: Stage | None) -> Condition:
    name = _CONDITION[stage]
    if seen.committed.has(stage):
        return Condition(name, "True", "Committed")
    if stage != current:
        if current is None or STAGES.index(stage) < STAGES.index(current):
            # A later output exists, so this one is not needed, whether or not it was kept.
            return Condition(name, "True", "Superseded", "a later stage's output is committed")
        return Condition(name, "False", "Pending", f"waits for {_CONDITION[current]}")
    if seen.spec.suspend:
        return Condition(name, "False", "Suspended")
    stalled, why = _stalled(seen, decided.record, stage)
    if stalled:
        return Condition(name, "False", stalled, why)
    doing, sentence = _doing(seen, decided, stage)
    return Condition(name, "False", doing, sentence)


def _stalled(seen: Observed, record: Record, stage: Stage | None) -> tuple[str, str]:
    if stage is None:
        return ("GateFailed", seen.committed.gate) if seen.committed.gate else ("", "")
    for role in _ROLES[stage]:
        mine = record.roles[role]
        if mine.stalled:
            return mine.stalled, told(mine)
    return "", ""


def _doing(seen: Observed, decided: Plan, stage: Stage | None) -> tuple[str, str]:
    """Reason and sentence of what goes on; the wait that says most comes first."""
    waits = [a for a in decided.actions if isinstance(a, Wait)]
    special = [w for w in waits if w.reason != "Running"]
    if special:
        return special[0].reason, special[0].message
    if any(isinstance(a, StopGroup) for a in decided.actions):
        return "Stopping", "ending processes that are not needed"
    if any(isinstance(a, Promote) for a in decided.actions):
        return "Promoting", "pointing the promoted drafter at this one"
    if any(isinstance(a, Start) for a in decided.actions):
        return "Starting", "starting processes"
    if stage is None:
        return "Done", ""
    pending = _pending_reason(seen, stage)
    return pending or _ING[stage], "; ".join(w.message for w in waits)


def _phase(seen: Observed, stage: Stage) -> Phase:
    """Waiting for room is not running."""
    mine = [c for c in seen.children if STAGE_OF[c.role] == stage and c.live]
    if mine and all(c.state == "pending" for c in mine):
        return "Queued" if any(c.reason in ("Unschedulable", *QUEUED) for c in mine) else "Pending"
    return _ING[stage]


def _pending_reason(seen: Observed, stage: Stage) -> str:
    pending = [c for c in seen.children if STAGE_OF[c.role] == stage and c.state == "pending" and c.reason]
    return pending[0].reason if pending else ""


def _last_failure(record: Record) -> Failure | None:
    told_of = [r.failure for r in record.roles.values() if r.failure is not None]
    return max(told_of, key=lambda f: f.at, default=None)
