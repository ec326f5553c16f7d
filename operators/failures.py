"""What an ended child means: whose fault it was, which budget it spends, and how long to wait.

Pure functions on observed data. Exit codes are those of `dflash.errors.ExitCode`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from dflash.errors import ExitCode
from operators.observed import Child, Failure, Role, RoleRecord

Budget = Literal["fatal", "restarts", "disruptions"]

FIRST_DELAY = 1.0
LONGEST_DELAY = 300.0


_MEMORY_ADVICE: dict[Role, str] = {
    "generate": "give it more memory, or lower spec.generation.inFlight",
    "target": "give it more memory, or lower spec.training.targetBatchTokens",
    "drafter": "give it more memory, or lower spec.training.microBatchTokens or queueDepth",
    "evaluate": "give it more memory, or lower spec.evaluation.concurrency",
}


def budget_of(child: Child) -> Budget:
    """Which budget a failed child spends.

    A configuration error is fatal: the same command would fail again. So is a child killed for its
    own memory limit, since the next one would need as much. Disruptions are nobody's fault: the
    platform took the child away, or it was killed or preempted from outside after a checkpoint.
    """
    if child.exit_code == ExitCode.CONFIGURATION or child.reason == "OOMKilled":
        return "fatal"
    if child.disrupted or child.exit_code in (ExitCode.KILLED, ExitCode.PREEMPTED):
        return "disruptions"
    return "restarts"


def reason_of(child: Child) -> str:
    """CamelCase reason of a failed child, for conditions and events."""
    if child.reason:
        return child.reason
    names = {
        int(ExitCode.CONFIGURATION): "ConfigurationError",
        int(ExitCode.TEMPORARY): "TemporaryError",
        int(ExitCode.KILLED): "Killed",
        int(ExitCode.PREEMPTED): "Preempted",
    }
    if child.exit_code is None:
        return "Disrupted" if child.disrupted else "Lost"
    return names.get(child.exit_code, "Failed")


def first_of(failed: Iterable[Child]) -> Child:
    """The child whose end caused the others' to end.

    A configuration error counts however late it is. Otherwise the earliest counts, and within one
    second (clusters keep time no finer) a temporary error last: it is how peers of a dead child end.
    """

    def order(child: Child) -> tuple[bool, int, bool, float]:
        ended = child.ended_at or 0.0
        return (budget_of(child) != "fatal", int(ended), child.exit_code == ExitCode.TEMPORARY, ended)

    return min(failed, key=order)


def describe(child: Child, now: float) -> Failure:
    """The failure as it is kept."""
    message = child.message[:1000]
    if child.reason == "OOMKilled":
        message = f"{message}; {_MEMORY_ADVICE[child.role]}".removeprefix("; ")
    return Failure(
        role=child.role,
        index=child.index,
        attempt=child.attempt,
        reason=reason_of(child),
        message=message,
        exit_code=child.exit_code,
        node=child.node,
        at=child.ended_at or now,
    )


def spend(record: RoleRecord, budget: Budget, failure: Failure, *, now: float, done: float) -> RoleRecord:
    """The record after one failure: budget spent, backoff set; not yet compared with its limit.

    `done` is the stage's progress: failures with progress between them are not a streak. The first
    disruption is answered at once.
    """
    streak = 1 if done > record.done_at_failure else record.streak + 1
    delay = backoff(
        streak if budget == "restarts" else streak - 1, f"{record.hash}/{failure.attempt}/{streak}"
    )
    return replace(
        record,
        restarts=record.restarts + (budget == "restarts"),
        disruptions=record.disruptions + (budget == "disruptions"),
        streak=streak,
        done_at_failure=max(done, record.done_at_failure),
        not_before=now + delay,
        stalled=failure.reason if budget == "fatal" else "",
        failure=failure,
    )


def backoff(failures: int, salt: str) -> float:
    """Seconds to wait after so many failures in a row: doubling from 1 s to 5 min, jittered.

    The jitter, a factor from 0.75 to 1.25, comes from the salt, so that planning stays a pure function.
    """
    if failures <= 0:
        return 0.0
    share = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:4], "big") / 2**32
    return min(FIRST_DELAY * 2.0 ** min(failures - 1, 20), LONGEST_DELAY) * (0.75 + share / 2)
