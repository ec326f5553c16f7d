"""What a target's threads share: its sessions with drafters, their queues, and everything counted.

One lock for all of it. A session is the target's end of a link. Decides nothing: `control` lets drafters
in, `server` captures, `sending` sends, and each of them may end a session.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.channel import messages
from dflash.channel.mailbox import Mailbox
from dflash.channel.shares import RecentShare
from dflash.model.states import States

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pending:
    """A request that waits for its turn."""

    arrival: int
    item: messages.Item
    ids: NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Length of the sample."""
        return len(self.ids)


@dataclass(frozen=True)
class Job:
    """States of one session's share of a captured batch, on their way to the wire."""

    items: list[messages.Item]
    states: list[States]
    captured: torch.cuda.Event | None


@dataclass(eq=False)
class Session:
    """One drafter, as the target knows it. Guarded by the roster's condition."""

    name: str
    route: bytes
    drafter: int
    attempt: int
    last_heard: float
    jobs: "queue.SimpleQueue[Job | None]" = field(default_factory=queue.SimpleQueue)
    pending: deque[Pending] = field(default_factory=deque)
    joined: bool = False
    unsent: int = 0
    """Batches that are captured, or being captured, and not yet sent."""
    closed: bool = False

    @property
    def label(self) -> str:
        """How logs call it."""
        return f"drafter-{self.drafter} (attempt {self.attempt})"


class Roster:
    """Sessions by their route, counters, and messages that wait for the control thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sessions: dict[bytes, Session] = {}
        self.stopping = False
        self.outbox: Mailbox[tuple[bytes, messages.FromTarget]] = Mailbox()
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.busy = RecentShare(time.monotonic())

    def idle_share(self) -> float:
        """Share of the last half minute in which nothing was captured."""
        with self.changed:
            return 1.0 - self.busy.share(time.monotonic())

    def tell(self, session: Session, message: messages.FromTarget) -> None:
        """Have the control thread send a message."""
        self.outbox.put((session.route, message))

    def note(self, cause: str) -> None:
        """Count why something was refused."""
        with self.changed:
            self.causes[cause] += 1

    def joined(self, session: Session) -> None:
        """Tensors can flow."""
        with self.changed:
            session.joined = not session.closed
            self.changed.notify_all()

    def sent(self, session: Session, size: int) -> None:
        """A batch has left: there is room for another."""
        with self.changed:
            session.unsent -= 1
            self.counts["bytes"] += size
            self.changed.notify_all()

    def end(self, session: Session, cause: str, *, tell: bool = True, clean: bool = False) -> None:
        """End a session and forget its requests. From any thread; the second call does nothing."""
        with self.changed:
            if session.closed:
                return
            session.closed = True
            session.joined = False
            session.pending.clear()
            self.sessions.pop(session.route, None)
            if not clean and not self.stopping:
                self.counts["links_dropped"] += 1
                self.causes[cause] += 1
            session.jobs.put(None)
            self.changed.notify_all()
        level = logging.INFO if clean else logging.WARNING
        logger.log(level, "link with %s ended: %s", session.label, cause)
        if tell:
            self.tell(session, messages.Closed(text=cause))

    def stop(self) -> None:
        """Make all threads end, and wake the control thread. Safe in a signal handler: takes no lock."""
        self.stopping = True
        self.outbox.wake()
