"""The one decision function: from (spec, committed state, children, own record) to what to do next.

Pure: no clock, no I/O, no randomness. Both executors call it after every change and at every
`wake_at`. They store `Plan.record` first and carry out `Plan.actions` second, so whatever they die in,
the next look finds an attempt number that was never used before.

Rules:
- A stage with a committed output is done, whoever made it.
- Generation workers, targets and the evaluation are elastic: each index is replaced on its own.
- Drafters are one group: attempt k+1 starts only when no drafter of any attempt lives.
- Configuration errors stall at once; errors and disruptions have budgets, and a jittered backoff.
- A suspended or obsolete run is stopped, and what it was stopped in spends no budget.
"""

import hashlib
from dataclasses import dataclass, field, replace

import orjson

from dflash.resource.drafter import DrafterSpec
from operators import failures
from operators.actions import Action, Promote, Start, StopChild, StopGroup, Wait
from operators.observed import (
    ROLES,
    STAGE_OF,
    Child,
    Failure,
    Observed,
    Record,
    Role,
    RoleRecord,
    Stage,
    hash_of,
)

APPEARANCE_SECONDS = 15.0
"""A child that was asked for and is not seen by then has vanished. Executors show it sooner."""

QUEUED = ("Suspended", "SchedulingGated")
"""Reasons of children that a queue, such as Kueue, has not let start yet: a Job's and a pod's."""

LINGER_SECONDS = 60.0
"""Children of a stage whose output is committed end by themselves; after this they are stopped."""


@dataclass(frozen=True)
class Plan:
    """What to store, then what to do, then when to look again at the latest."""

    record: Record
    actions: tuple[Action, ...]

    @property
    def wake_at(self) -> float | None:
        """Earliest time at which a wait ends; None when only a change can."""
        times = [a.until for a in self.actions if isinstance(a, Wait) and a.until is not None]
        return min(times, default=None)

    @property
    def idle(self) -> bool:
        """Nothing is done and nothing is waited for: the Drafter is as it was declared."""
        return not self.actions


def plan(seen: Observed) -> Plan:
    """Decide. Raises nothing: an observation that makes no sense leads to stopping and starting again."""
    draft = _Draft(seen, _current(seen))
    stage = current_stage(seen)
    if seen.spec.suspend:
        draft.stop([c for c in seen.children if c.live], "Suspended")
        return draft.finish()
    if draft.clear_the_way(stage):
        return draft.finish()
    if stage == "generation":
        draft.elastic("generate", seen.spec.generation.replicas)
    elif stage == "training":
        draft.elastic("target", desired_targets(seen))
        if not draft.record.roles["target"].stalled:
            draft.drafters()
        draft.release_when_stalled()
    elif stage == "evaluation":
        draft.elastic("evaluate", 1)
    elif not seen.committed.gate and not seen.committed.promoted:
        draft.actions.append(Promote(seen.name, seen.hashes.drafter, seen.hashes.evaluation))
    return draft.finish()


def current_stage(seen: Observed) -> Stage | None:
    """The first stage whose output is missing. A committed evaluation needs no dataset any more."""
    if seen.committed.evaluation:
        return None
    if seen.committed.export:
        return "evaluation"
    return "training" if seen.committed.dataset else "generation"


def desired_targets(seen: Observed) -> int:
    """Targets wanted now."""
    training = seen.spec.training
    if training.targets != "auto":
        return training.targets
    # Without a word from the run, such as while an attempt starts, what is there stays.
    mine = [c for c in seen.children if c.role == "target" and c.hash == seen.hashes.drafter and c.live]
    wanted = seen.suggested_targets or max((c.index + 1 for c in mine), default=training.min_targets)
    return max(training.min_targets, min(wanted, training.max_targets))


def spec_digest(spec: DrafterSpec) -> str:
    """Digest of everything a person can change to get fresh budgets; suspending is no such change."""
    fields = spec.model_dump(mode="json", exclude={"suspend"})
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def restarted(record: Record) -> Record:
    """The record for a new run of an executor whose children died with it: a person has tried again.

    Budgets are fresh. An attempt that was begun is over, and its number is not used again.
    """
    return Record(
        record.spec,
        {
            role: RoleRecord(hash=r.hash, attempt=r.attempt + (r.launched_at is not None))
            for role, r in record.roles.items()
        },
    )


def _current(seen: Observed) -> Record:
    """The record fitted to the hashes and the spec at hand."""
    digest = spec_digest(seen.spec)
    roles: dict[Role, RoleRecord] = {}
    for role in ROLES:
        wanted = hash_of(role, seen.hashes)
        known = seen.record.roles.get(role)
        if known is None or known.hash != wanted:
            known = _fresh(seen, role, wanted)
        elif seen.record.spec != digest:
            known = replace(known, restarts=0, disruptions=0, streak=0, not_before=0.0, stalled="")
        roles[role] = known
    return Record(digest, roles)


def _fresh(seen: Observed, role: Role, wanted: str) -> RoleRecord:
    """A first record. A live drafter group is adopted; otherwise its attempt is one never used."""
    if role != "drafter":
        return RoleRecord(hash=wanted)
    mine = [c for c in seen.children if c.role == "drafter" and c.hash == wanted]
    newest = max((c.attempt for c in mine), default=-1)
    group = [c for c in mine if c.attempt == newest]
    if newest >= seen.committed.attempt and any(c.live for c in group):
        return RoleRecord(hash=wanted, attempt=newest, launched_at=min(c.created_at for c in group))
    return RoleRecord(hash=wanted, attempt=max(newest, seen.committed.attempt) + 1)


@dataclass
class _Draft:
    """A plan in the making."""

    seen: Observed
    record: Record
    actions: list[Action] = field(default_factory=list)
    stopped: set[tuple[Role, str, int]] = field(default_factory=set)

    def finish(self) -> Plan:
        """The plan. Ids of children that are gone need not be remembered."""
        present = {c.id for c in self.seen.children}
        for role in ROLES:
            mine = self.record.roles[role]
            self._keep(role, replace(mine, counted=mine.counted & present))
        return Plan(self.record, tuple(self.actions))

    def stop(self, children: list[Child], reason: str) -> None:
        """Stop the groups of these children. However they end now, it spends no budget."""
        for child in children:
            mine = self.record.roles[child.role]
            mine = replace(mine, counted=mine.counted | {child.id})
            if (child.role, child.hash, child.attempt) == ("drafter", mine.hash, mine.attempt):
                mine = replace(mine, attempt=mine.attempt + 1, launched_at=None)
            self._keep(child.role, mine)
            group = (child.role, child.hash, child.attempt)
            if group not in self.stopped and any(c.state != "stopping" for c in self._group(group)):
                self.stopped.add(group)
                self.actions.append(StopGroup(*group, reason))
        if children:
            self._wait(None, reason, f"{len(children)} {_plural('process', children)} to end ({reason})")

    def clear_the_way(self, stage: Stage | None) -> bool:
        """End what this stage has no use for; True while something of it still lives."""
        now = self.seen.now
        lingering: list[Child] = []
        obsolete: list[Child] = []
        for child in self.seen.children:
            if not child.live:
                continue
            mine = self.record.roles[child.role]
            if child.hash != mine.hash:
                obsolete.append(child)
            elif STAGE_OF[child.role] != stage:
                if mine.committed_at is None:
                    mine = replace(mine, committed_at=now)
                    self._keep(child.role, mine)
                assert mine.committed_at is not None
                late = now >= mine.committed_at + LINGER_SECONDS
                (obsolete if child.role == "target" or late else lingering).append(child)
        self.stop(obsolete, "Obsolete")
        if lingering:
            until = min(self.record.roles[c.role].committed_at or now for c in lingering) + LINGER_SECONDS
            what = f"{len(lingering)} {_plural('process', lingering)} whose work is committed to end"
            self._wait(until, "Finishing", what)
        return bool(obsolete or lingering)

    def elastic(self, role: Role, wanted: int) -> None:
        """Keep `wanted` children of a role alive, each index on its own."""
        seen, now = self.seen, self.seen.now
        mine = self.record.roles[role]
        # A worker's share follows from how many there are, so another number means other workers.
        world = wanted if role == "generate" else 1
        children = [c for c in seen.children if c.role == role and c.hash == mine.hash]
        if role == "generate" and any(c.live and c.world != world for c in children):
            self.stop([c for c in children if c.live], "Resized")
            return
        failed = [c for c in children if c.state == "failed" and c.id not in mine.counted]
        for child in sorted(failed, key=lambda c: (c.ended_at or 0.0, c.index)):
            mine = replace(mine, counted=mine.counted | {child.id})
            if mine.stalled:
                continue  # what followed the fatal one explains nothing
            mine = self._spend(mine, failures.budget_of(child), failures.describe(child, now))
        early = [c for c in children if c.state == "succeeded" and c.id not in mine.counted]
        for child in early if role == "target" else []:
            what = "it ended with success while it was needed"
            mine = replace(mine, counted=mine.counted | {child.id})
            mine = self._spend(mine, "restarts", self._own(role, "EndedEarly", what, 0))
        self._keep(role, mine)
        if mine.stalled:
            self.stop([c for c in children if c.live], mine.stalled)
            self._wait(None, mine.stalled, told(mine))
            return
        for child in children:
            if child.live and child.index >= wanted and child.state != "stopping":
                self._keep(role, replace(mine, counted=mine.counted | {child.id}))
                self.actions.append(StopChild(child, "Resized"))
                mine = self.record.roles[role]
        live = [c for c in children if c.live]
        if role != "target" and self._deadline(role, live):
            return
        # A target serves until it is stopped, so one that ended well is simply missing.
        ended = {c.index for c in children if c.state == "succeeded" and c.world == world}
        finished = ended if role != "target" else set()
        if role != "target" and not live and len(finished & set(range(wanted))) == wanted:
            finished = self._unfinished_business(role, children)
            mine = self.record.roles[role]
            if mine.stalled:
                self._wait(None, mine.stalled, told(mine))
                return
        missing = tuple(i for i in range(wanted) if i not in {c.index for c in live} | finished)
        if missing and now < mine.not_before:
            self._wait(mine.not_before, "Backoff", f"starting {role} again after: {told(mine)}")
        elif missing:
            self.actions.append(Start(role, mine.hash, 0, missing, world))
        elif live:
            self._wait(self._next_deadline(role, live), "Running", _pending(live))

    def drafters(self) -> None:
        """Keep one attempt of the drafter group alive, and never two."""
        seen, now = self.seen, self.seen.now
        mine = self.record.roles["drafter"]
        world = seen.spec.training.drafters
        group = [
            c
            for c in seen.children
            if c.role == "drafter" and c.hash == mine.hash and c.attempt == mine.attempt
        ]
        if mine.launched_at is not None and not mine.stalled:
            mine = self._judge(mine, group, world)
            self._keep("drafter", mine)
        live = [c for c in seen.children if c.role == "drafter" and c.live]
        if mine.launched_at is not None and not mine.stalled:
            until = self._next_deadline("drafter", live)
            if len(group) < world:
                until = min(until, mine.launched_at + APPEARANCE_SECONDS)
            self._wait(until, "Running", _pending(live))
            return
        if live:
            self.stop(live, mine.failure.reason if mine.failure else "Restarting")
        if mine.stalled:
            self._wait(None, mine.stalled, told(mine))
        elif live:
            return
        elif now < mine.not_before:
            self._wait(mine.not_before, "Backoff", f"attempt {mine.attempt} starts after: {told(mine)}")
        else:
            self._keep("drafter", replace(mine, launched_at=now))
            self.actions.append(Start("drafter", mine.hash, mine.attempt, tuple(range(world)), world))

    def release_when_stalled(self) -> None:
        """A stalled half of the training stage leaves nothing running in the other half."""
        reason = self.record.roles["target"].stalled or self.record.roles["drafter"].stalled
        if reason:
            self.actions = [a for a in self.actions if not isinstance(a, Start)]
            self.stop([c for c in self.seen.children if STAGE_OF[c.role] == "training" and c.live], reason)

    def _judge(self, mine: RoleRecord, group: list[Child], world: int) -> RoleRecord:
        """The record after a look at the running attempt: unchanged, or the next attempt's."""
        seen, now = self.seen, self.seen.now
        assert mine.launched_at is not None
        if any(c.world != world for c in group if c.live):
            return replace(mine, attempt=mine.attempt + 1, launched_at=None, not_before=0.0)
        failed = [c for c in group if c.state == "failed"]
        leaving = [c for c in group if c.state == "stopping"]
        if failed:
            first = failures.first_of(failed)
            return self._next_attempt(mine, failures.budget_of(first), failures.describe(first, now))
        if leaving:
            gone = replace(leaving[0], disrupted=True, reason=leaving[0].reason or "Deleted")
            gone = replace(gone, message=gone.message or "it was deleted from outside")
            return self._next_attempt(mine, "disruptions", failures.describe(gone, now))
        if len({c.index for c in group}) < world and now >= mine.launched_at + APPEARANCE_SECONDS:
            what = f"{len(group)} of {world} drafters of attempt {mine.attempt} are there"
            return self._next_attempt(
                mine, "disruptions", self._own("drafter", "Vanished", what, mine.attempt)
            )
        if group and all(c.state == "succeeded" for c in group) and len(group) == world:
            what = "the drafters ended with success, but the export is not committed"
            return self._next_attempt(mine, "restarts", self._own("drafter", "NoExport", what, mine.attempt))
        late = self._late("drafter", [c for c in group if c.live])
        if late is not None:
            budget, failure = late
            if failure.reason != "ProgressDeadlineExceeded":
                # Nothing ran: give all back rather than hold half a group.
                self.stop([c for c in seen.children if c.role == "target" and c.live], failure.reason)
            return self._next_attempt(mine, budget, failure)
        return mine

    def _next_attempt(self, mine: RoleRecord, budget: failures.Budget, failure: Failure) -> RoleRecord:
        spent = self._spend(mine, budget, failure)
        return replace(spent, attempt=mine.attempt + 1, launched_at=None)

    def _spend(self, mine: RoleRecord, budget: failures.Budget, failure: Failure) -> RoleRecord:
        progress = self.seen.progress.get(STAGE_OF[failure.role])
        spent = failures.spend(
            mine, budget, failure, now=self.seen.now, done=progress.done if progress else 0.0
        )
        training = self.seen.spec.training
        if spent.restarts > training.max_restarts:
            return replace(spent, stalled="RestartsExhausted")
        # Whoever can be replaced alone is replaced for as long as the platform takes it away.
        if failure.role == "drafter" and spent.disruptions > training.max_disruptions:
            return replace(spent, stalled="DisruptionsExhausted")
        return spent

    def _unfinished_business(self, role: Role, children: list[Child]) -> set[int]:
        """All ended well, and yet there is no commit: count it once, and start all of them again."""
        mine = self.record.roles[role]
        fresh = [c for c in children if c.state == "succeeded" and c.id not in mine.counted]
        if fresh:
            mine = replace(mine, counted=mine.counted | {c.id for c in fresh})
            what = "every process ended with success, but the output is not committed"
            self._keep(role, self._spend(mine, "restarts", self._own(role, "NoCommit", what, 0)))
        return set()

    def _deadline(self, role: Role, live: list[Child]) -> bool:
        """Replace an elastic stage that is too long without progress; True when it is."""
        late = self._late(role, live)
        if late is None:
            return False
        budget, failure = late
        self._keep(role, self._spend(self.record.roles[role], budget, failure))
        self.stop(live, failure.reason)
        return True

    def _late(self, role: Role, live: list[Child]) -> tuple[failures.Budget, Failure] | None:
        """The deadline that has passed, if one has."""
        if not live or self.seen.now < self._next_deadline(role, live):
            return None
        training = self.seen.spec.training
        attempt = self.record.roles[role].attempt
        if self._moved_at(role, live) is not None:
            seconds = training.progress_deadline_seconds
            what = f"no progress for {seconds} s (progressDeadlineSeconds)"
            return "restarts", self._own(role, "ProgressDeadlineExceeded", what, attempt)
        pending = [
            c for c in self.seen.children if STAGE_OF[c.role] == STAGE_OF[role] and c.state == "pending"
        ]
        why = _why(pending)
        what = f"no first step within {training.startup_deadline_seconds} s (startupDeadlineSeconds){why}"
        # Waiting for room on the cluster is no fault of the run.
        room = next((c.reason for c in pending if c.reason in ("Unschedulable", *QUEUED)), "")
        reason = room or "StartupDeadlineExceeded"
        return ("disruptions" if room else "restarts"), self._own(role, reason, what, attempt)

    def _next_deadline(self, role: Role, live: list[Child]) -> float:
        """When these children will have been too long without progress."""
        training = self.seen.spec.training
        stage = [c for c in self.seen.children if STAGE_OF[c.role] == STAGE_OF[role] and c.live]
        if stage and all(c.reason in QUEUED for c in stage):
            return float("inf")  # they hold nothing, and starting again would lose their turn
        moved = self._moved_at(role, live)
        if moved is not None:
            return moved + training.progress_deadline_seconds
        return min(c.created_at for c in live) + training.startup_deadline_seconds if live else float("inf")

    def _moved_at(self, role: Role, live: list[Child]) -> float | None:
        """When this incarnation of the stage last made progress; None before its first step."""
        progress = self.seen.progress.get(STAGE_OF[role])
        if progress is None or not live:
            return None
        if role == "drafter" and progress.attempt != self.record.roles[role].attempt:
            return None
        began = min(c.created_at for c in live)
        return progress.moved_at if progress.moved_at > began else None

    def _own(self, role: Role, reason: str, message: str, attempt: int) -> Failure:
        """A failure that no child reported."""
        return Failure(role, 0, attempt, reason, message, None, "", self.seen.now)

    def _group(self, group: tuple[Role, str, int]) -> list[Child]:
        return [c for c in self.seen.children if (c.role, c.hash, c.attempt) == group and c.live]

    def _keep(self, role: Role, record: RoleRecord) -> None:
        self.record = self.record.with_role(role, record)

    def _wait(self, until: float | None, reason: str, message: str) -> None:
        finite = None if until == float("inf") else until
        self.actions.append(Wait(finite, reason, message))


def told(mine: RoleRecord) -> str:
    """One sentence on the failure that a role waits or stalls for."""
    failure = mine.failure
    if failure is None:
        return mine.stalled
    who = f"{failure.role} {failure.index}" + (
        f", attempt {failure.attempt}" if failure.role == "drafter" else ""
    )
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    return f"{failure.reason} ({who}{code}): {failure.message}".rstrip(": ")


def _pending(live: list[Child]) -> str:
    waiting = [c for c in live if c.state == "pending"]
    if not waiting:
        return f"{len(live)} {_plural('process', live)} running"
    return f"{len(waiting)} of {len(live)} pending{_why(waiting)}"


def _why(waiting: list[Child]) -> str:
    """What the platform says of children that do not run yet; a reason counts for more than a remark."""
    told = sorted((c for c in waiting if c.reason or c.message), key=lambda c: not c.reason)
    return f": {told[0].reason} {told[0].message}".replace(":  ", ": ").rstrip() if told else ""


def _plural(word: str, items: list[Child]) -> str:
    return word if len(items) == 1 else word + "es"
