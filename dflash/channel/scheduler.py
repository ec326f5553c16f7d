"""Which target is asked for which sample: window, least outstanding work, order, re-issue, deadlines.

Pure: no clock, no sockets, no threads. Whoever drives it passes the time in and carries out what it
returns, so that one and the same code runs in a drafter, in tests with random orders of events, and in
a simulation of many targets and drafters.
"""

import heapq
from dataclasses import dataclass, field

_MEMORY = 0.9
"""What one arrival leaves of the past in a target's measured rate: about the last ten arrivals."""


@dataclass
class _Work:
    """One sample from its submission until it is taken in order."""

    tokens: int
    target: str | None = None
    deadline: float = 0.0
    issued: int = 0
    refusals: int = 0
    refused_by: set[str] = field(default_factory=set)


@dataclass
class _Target:
    """What is outstanding at one target, and how fast it has been lately."""

    capacity: int
    outstanding: set[int] = field(default_factory=set)
    tokens: int = 0
    busy_from: float = 0.0
    recent_tokens: float = 0.0
    recent_seconds: float = 0.0

    def rate(self) -> float | None:
        """Tokens per second while it had something to do; None before the first arrival."""
        return self.recent_tokens / self.recent_seconds if self.recent_seconds > 0.0 else None


class Scheduler:
    """Spreads samples over targets and restores their order.

    A sample is waiting, outstanding at one target, ready, or taken. Samples are submitted and taken in
    the order of their indexes (0, 1, 2, ...); in between, they may be lost and come back any number of
    times, in any order. The caller bounds the window by submitting no more than it wants in it.
    """

    def __init__(self, deadline: float, max_refusals: int) -> None:
        """`deadline`: seconds a target has for one request; `max_refusals`: then a sample has failed."""
        self._deadline = deadline
        self._max_refusals = max_refusals
        self._works: dict[int, _Work] = {}
        self._waiting: list[int] = []
        self._targets: dict[str, _Target] = {}
        self._ready: set[int] = set()
        self._next_submitted = 0
        self._next_taken = 0

    def submit(self, tokens: int) -> int:
        """Add the next sample, of so many tokens; its index is returned."""
        index = self._next_submitted
        self._next_submitted += 1
        self._works[index] = _Work(tokens)
        heapq.heappush(self._waiting, index)
        return index

    def join(self, target: str, capacity: int) -> None:
        """A target may be asked from now on, for up to `capacity` tokens at a time (or one sample)."""
        if target in self._targets:
            raise ValueError(f"{target} has joined already")
        self._targets[target] = _Target(capacity)

    def leave(self, target: str) -> list[int]:
        """A target is gone: what was outstanding there waits again, and is returned in order."""
        gone = self._targets.pop(target, None)
        lost = sorted(gone.outstanding) if gone else []
        for index in lost:
            self._requeue(index)
        return lost

    def assign(self, now: float) -> list[tuple[str, int]]:
        """Hand out waiting samples, lowest index first: (target, index) pairs to be asked for now.

        Each goes to the target that would finish it first: least outstanding tokens, seen against the
        rate at which the target has been answering (the mean of the others' for a new one).
        """
        rates = [rate for t in self._targets.values() if (rate := t.rate()) is not None]
        usual = sum(rates) / len(rates) if rates else 1.0
        assigned: list[tuple[str, int]] = []
        passed_over: list[int] = []
        room = {name: t for name, t in self._targets.items() if t.tokens < t.capacity}
        while self._waiting and room:
            index = heapq.heappop(self._waiting)
            work = self._works[index]
            willing = [name for name in room if name not in work.refused_by]
            if not willing and all(name in work.refused_by for name in self._targets):
                willing = list(room)  # refused by all that are left: ask again rather than wait
            best, soonest = None, 0.0
            for name in willing:
                target = room[name]
                if target.outstanding and target.tokens + work.tokens > target.capacity:
                    continue
                finish = (target.tokens + work.tokens) / (target.rate() or usual)
                if best is None or finish < soonest:
                    best, soonest = name, finish
            if best is None:
                passed_over.append(index)
                if willing and len(willing) == len(room):
                    break  # no room for this one anywhere: later ones do not overtake it
                continue
            self._issue(best, index, now)
            assigned.append((best, index))
            if self._targets[best].tokens >= self._targets[best].capacity:
                del room[best]
        for index in passed_over:
            heapq.heappush(self._waiting, index)
        return assigned

    def deliver(self, target: str, index: int, now: float) -> bool:
        """A good reply. False if it was not outstanding there (any more): it is to be thrown away."""
        if not self._settle(target, index, now):
            return False
        self._ready.add(index)
        return True

    def refuse(self, target: str, index: int, now: float) -> bool:
        """No reply, or a bad one: the sample waits again, for another target if there is one.

        True when it has been refused too often and will not be asked for any more.
        """
        if not self._settle(target, index, now):
            return False
        work = self._works[index]
        work.refusals += 1
        work.refused_by.add(target)
        if work.refusals >= self._max_refusals:
            return True
        self._requeue(index)
        return False

    def give_up(self, index: int) -> None:
        """A sample that was refused too often is handed over without states, in its place of the order."""
        self._ready.add(index)

    def take(self) -> list[int]:
        """Indexes that are ready and next in order; each is returned once."""
        taken = []
        while self._next_taken in self._ready:
            self._ready.remove(self._next_taken)
            del self._works[self._next_taken]
            taken.append(self._next_taken)
            self._next_taken += 1
        return taken

    def overdue(self, now: float) -> list[str]:
        """Targets that hold a request past its deadline."""
        return [
            name
            for name, target in self._targets.items()
            if any(self._works[index].deadline <= now for index in target.outstanding)
        ]

    def holds(self, target: str, index: int) -> int | None:
        """Tokens of a sample outstanding at a target; None if it is not outstanding there."""
        known = self._targets.get(target)
        return self._works[index].tokens if known and index in known.outstanding else None

    def issued(self, index: int) -> int:
        """How often a sample that is not yet taken has been asked for."""
        return self._works[index].issued

    def refusals(self, index: int) -> int:
        """How often a sample that is not yet taken has been refused."""
        return self._works[index].refusals

    def outstanding(self, target: str) -> tuple[int, int]:
        """Samples and tokens outstanding at a target."""
        known = self._targets.get(target)
        return (len(known.outstanding), known.tokens) if known else (0, 0)

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets that have joined and not left."""
        return tuple(self._targets)

    @property
    def waiting(self) -> int:
        """Samples that no target has been asked for, or that came back."""
        return len(self._waiting)

    @property
    def ready(self) -> int:
        """Samples that arrived before one that is ahead of them in order."""
        return len(self._ready)

    @property
    def unfinished(self) -> int:
        """Samples submitted and not taken."""
        return self._next_submitted - self._next_taken

    def _issue(self, name: str, index: int, now: float) -> None:
        work, target = self._works[index], self._targets[name]
        work.target = name
        work.issued += 1
        work.deadline = now + self._deadline
        if not target.outstanding:
            target.busy_from = now
        target.outstanding.add(index)
        target.tokens += work.tokens

    def _settle(self, name: str, index: int, now: float) -> bool:
        """Take a request off a target's account and learn its rate."""
        target = self._targets.get(name)
        if target is None or index not in target.outstanding:
            return False
        work = self._works[index]
        target.outstanding.remove(index)
        target.tokens -= work.tokens
        target.recent_tokens = _MEMORY * target.recent_tokens + work.tokens
        target.recent_seconds = _MEMORY * target.recent_seconds + (now - target.busy_from)
        target.busy_from = now
        work.target = None
        return True

    def _requeue(self, index: int) -> None:
        self._works[index].target = None
        heapq.heappush(self._waiting, index)
