"""A drafter's loop: the one thread that owns its sockets and makes every decision about its links.

It connects to the targets that discovery finds, asks them for samples as the window says, and ends a link
on a lost connection, on silence, on a request past its deadline, on a failed or malformed transfer and on
repeated bad replies. What was outstanding there goes to other targets at once, and the target is tried
again with growing pauses, or at once if it is a new process.
"""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from dflash.channel import messages
from dflash.channel.buffers import BufferPool
from dflash.channel.connection import Connection
from dflash.channel.interface import Member, Reply, Request, TargetStats
from dflash.channel.keys import KeyPair
from dflash.channel.mailbox import Mailbox
from dflash.channel.receipt import Arrived, Failed, Joined, Receiver, ReceiveSettings
from dflash.channel.window import Window
from dflash.channel.wire import is_cut_well
from dflash.errors import TemporaryError

logger = logging.getLogger(__name__)

_BATCHES_AHEAD = 3
"""Token budgets outstanding at one target: on the wire, being captured, next in line."""
_FAULTS_PER_LINK = 3
"""Transfers with a bad reply until a link ends."""
_PAUSE_SECONDS = (0.5, 10.0)
"""First and longest pause before a target that failed is tried again."""
_LOOKS_PER_HEARTBEAT = 4
"""How often deadlines are looked at."""


@dataclass(frozen=True)
class Found:
    """Who the members are now."""

    members: Sequence[Member]


@dataclass(frozen=True)
class Submitted:
    """The next request of the stream; None: there are no more."""

    request: Request | None


Event = Joined | Arrived | Failed | Found | Submitted


@dataclass(frozen=True)
class Introduction:
    """How a drafter introduces itself to every target."""

    run: str
    attempt: int
    index: int
    instance: str


@dataclass(eq=False)
class _Link:
    """One target, as the drafter knows it."""

    member: Member
    name: str
    connection: Connection
    deadline: float
    last_heard: float
    receiver: Receiver | None = None
    live: bool = False
    capacity: int = 0
    pinged_at: float = 0.0
    faults: int = 0
    announced: set[int] = field(default_factory=set)
    delivered: int = 0
    idle_share: float | None = None


@dataclass
class _Trials:
    """How often a target's instance has failed in a row, and when it may be tried again."""

    instance: str
    failures: int = 0
    not_before: float = 0.0


class Loop:
    """Driven by `turn`. Not thread-safe but for `events`; whoever drives it locks."""

    def __init__(
        self, window: Window, introduction: Introduction, keys: KeyPair, settings: ReceiveSettings
    ) -> None:
        self.events: Mailbox[Event] = Mailbox()
        self.receiving: list[threading.Thread] = []
        """Threads of links, of ended ones too while they run."""
        self._window = window
        self._scheduler = window.scheduler
        self._introduction = introduction
        self._keys = keys
        self._settings = settings
        self._timeouts = settings.timeouts
        self._buffers = BufferPool(settings.device)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self.events.fileno(), zmq.POLLIN)
        self._links: dict[str, _Link] = {}
        self._members: Sequence[Member] = ()
        self._trials: dict[str, _Trials] = {}
        self._last_cause = "none was found"
        self._turned_at = time.monotonic()
        self._look_at = 0.0
        self._without_target_since = time.monotonic()
        self._waiting = False

    def wait(self) -> dict[object, int]:
        """Until there is something to do, or to look at; what `turn` wants to know."""
        return dict(self._poller.poll(int(self._timeouts.heartbeat * 500)))

    def turn(self, woken: dict[object, int], now: float) -> list[Reply]:
        """One round: what came in, what is due, who is asked for what; replies that are next in order.

        TemporaryError when there has been no target for too long, or a later attempt has taken over.
        """
        self._excuse(now)
        for event in self.events.drain():
            self._handle(event, now)
        for link in list(self._links.values()):
            if link.connection.has_messages(woken):
                self._read(link, now)  # before the connection's end: the target may have said why
            if link.connection.has_ended(woken) and link.name in self._links:
                self._drop(link, link.connection.ending(), now)
        if now >= self._look_at:
            self._look_at = now + self._timeouts.heartbeat / _LOOKS_PER_HEARTBEAT
            self._check_times(now)
            self._connect(now)
            self._check_targets(now)
        for name, ask, payload in self._window.asks(now):
            self._links[name].connection.post(ask, payload)
        return self._window.take()

    def status(self) -> str:
        """What it is doing, in words."""
        if any(link.live for link in self._links.values()):
            return "streaming"
        return f"waiting for targets ({self._last_cause})"

    def targets(self) -> tuple[TargetStats, ...]:
        """Every link."""
        return tuple(
            TargetStats(
                link.member.name,
                link.live,
                *self._scheduler.outstanding(name),
                link.delivered,
                link.idle_share,
            )
            for name, link in self._links.items()
        )

    def close(self) -> None:
        """Say goodbye to all targets and free the sockets."""
        for link in list(self._links.values()):
            link.connection.post(messages.Bye())
            self._forget(link, linger=200)
        self._context.term()
        self.events.close()

    def _excuse(self, now: float) -> None:
        """If this thread itself was held up (a stopped process, no processor), nobody else was silent."""
        held_up = now - self._turned_at
        self._turned_at = now
        if held_up > 4 * self._timeouts.heartbeat:
            for link in self._links.values():
                link.last_heard += held_up

    # Events

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Submitted):
            self._window.submit(event.request)
            return
        if isinstance(event, Found):
            self._members = [member for member in event.members if member.role == "target"]
            self._look_at = now
            return
        if isinstance(event, Arrived):
            self._window.counts["bytes"] += event.size
        link = self._links.get(event.link)
        if link is None:
            return  # it has ended: its samples were asked for elsewhere
        if isinstance(event, Arrived):
            self._arrived(link, event, now)
        elif isinstance(event, Joined):
            link.live = True
            self._scheduler.join(link.name, link.capacity)
            logger.info("linked with %s", link.member.name)
        else:
            self._drop(link, event.cause, now)

    def _arrived(self, link: _Link, event: Arrived, now: float) -> None:
        fault = None
        for item, states in zip(event.items, event.states, strict=True):
            link.announced.discard(item.index)
            if isinstance(states, str):
                fault = states
                self._window.counts["bad_replies"] += 1
                self._window.refused(link.name, link.member.name, item.index, states, now)
            elif self._window.arrived(link.name, item.index, states, now):
                link.delivered += 1
        if fault is None:
            self._trials.pop(link.member.name, None)
            return
        link.faults += 1
        if link.faults >= _FAULTS_PER_LINK:
            self._drop(link, f"{link.faults} bad transfers, the last one: {fault}", now)

    # Messages

    def _read(self, link: _Link, now: float) -> None:
        """All messages that are here, until the link ends or there are no more."""
        try:
            for message in link.connection.received():
                link.last_heard = now
                self._message(link, message, now)
                if link.name not in self._links:
                    return
        except messages.MessageError as error:
            self._drop(link, f"bad control message: {error}", now)

    def _message(self, link: _Link, message: messages.FromTarget, now: float) -> None:
        if isinstance(message, messages.Welcome):
            self._welcome(link, message)
        elif isinstance(message, messages.Batch):
            self._announced(link, message)
        elif isinstance(message, messages.Refused):
            if self._scheduler.holds(link.name, message.index) is None:
                raise messages.MessageError(f"sample {message.index} was refused without being asked for")
            self._window.counts["refusals"] += 1
            self._window.refused(link.name, link.member.name, message.index, message.text, now)
        elif isinstance(message, messages.Pong):
            link.idle_share = message.idle_share
        elif isinstance(message, messages.Closed):
            self._drop(link, f"closed by the target: {message.text}", now)
        elif message.code == "superseded":
            raise TemporaryError(
                f"{link.member.name} refuses this drafter: {message.text}; this process is a "
                "leftover and ends"
            )
        else:
            self._drop(link, f"refused ({message.code}): {message.text}", now)

    def _welcome(self, link: _Link, welcome: messages.Welcome) -> None:
        if link.receiver is not None:
            raise messages.MessageError("a second welcome")
        link.capacity = _BATCHES_AHEAD * welcome.token_budget
        link.receiver = Receiver(link.name, welcome, self._settings, self._buffers, self.events.put)
        link.receiver.start()
        alive = [thread for thread in self.receiving if thread.is_alive()]
        self.receiving = alive + link.receiver.threads

    def _announced(self, link: _Link, batch: messages.Batch) -> None:
        """A transfer must bring what was asked for, once, in the right lengths: else all is in doubt."""
        if link.receiver is None:
            raise messages.MessageError("a batch before the welcome")
        for item in batch.items:
            tokens = self._scheduler.holds(link.name, item.index)
            if tokens is None or item.index in link.announced:
                raise messages.MessageError(f"sample {item.sample_id!r} was not asked for")
            if tokens != item.length:
                raise messages.MessageError(
                    f"sample {item.sample_id!r} has {tokens:,} tokens, but states of {item.length:,} were "
                    "announced"
                )
            link.announced.add(item.index)
        if not is_cut_well(batch.sizes, sum(item.length for item in batch.items), self._settings.identity):
            raise messages.MessageError(f"{sum(batch.sizes):,} bytes cannot be what was asked for")
        link.receiver.announced(batch)

    # Links

    def _connect(self, now: float) -> None:
        """Say hello to targets that are not linked and may be tried."""
        linked = {link.member.name: link for link in self._links.values()}
        for member in self._members:
            link = linked.get(member.name)
            if link is not None:
                if link.member.instance == member.instance:
                    continue
                self._drop(link, "a new process has taken its place", now)
            trials = self._trials.get(member.name)
            if trials is None or trials.instance != member.instance:
                trials = self._trials[member.name] = _Trials(member.instance)
            if now >= trials.not_before:
                self._open(member, now)

    def _open(self, member: Member, now: float) -> None:
        name = f"{member.name}/{uuid.uuid4().hex}"
        connection = Connection(self._context, self._poller, self._keys)
        link = _Link(member, name, connection, now + self._timeouts.hello, last_heard=now)
        self._links[name] = link
        problem = connection.connect(member)
        if problem is not None:
            self._drop(link, problem, now)
            return
        me, identity = self._introduction, self._settings.identity
        connection.post(
            messages.Hello(
                version=messages.VERSION,
                run=me.run,
                attempt=me.attempt,
                index=me.index,
                instance=me.instance,
                link=name,
                fingerprint=identity.fingerprint,
                taps=list(identity.taps),
                hidden_size=identity.hidden_size,
                dtype=identity.dtype,
                final=identity.final,
                backend=self._settings.backend,
            )
        )

    def _drop(self, link: _Link, cause: str, now: float) -> None:
        """End a link: its samples wait for other targets, and its target for a while."""
        was_live = link.live
        lost = self._forget(link)
        trials = self._trials.setdefault(link.member.name, _Trials(link.member.instance))
        first, longest = _PAUSE_SECONDS
        trials.not_before = now + min(longest, first * 2**trials.failures)
        trials.failures += 1
        self._last_cause = f"{link.member.name}: {cause}"
        self._window.causes[cause] += 1
        if was_live:
            self._window.counts["links_lost"] += 1
            logger.warning("%s lost (%s); %d samples go to others", link.member.name, cause, lost)
        elif trials.failures == 1:
            logger.warning("%s cannot be used: %s", link.member.name, cause)

    def _forget(self, link: _Link, linger: int = 0) -> int:
        """Free a link's sockets and threads; how many samples were outstanding there."""
        del self._links[link.name]
        lost = self._scheduler.leave(link.name)
        link.live = False
        if link.receiver is not None:
            link.receiver.end()
        link.connection.close(linger)
        return len(lost)

    # What is due

    def _check_times(self, now: float) -> None:
        overdue = set(self._scheduler.overdue(now))
        for link in list(self._links.values()):
            if not link.live and now >= link.deadline:
                self._drop(link, f"no answer to hello in {self._timeouts.hello:.0f} s", now)
            elif link.live and now - link.last_heard > self._timeouts.silence:
                self._drop(link, f"silent for {self._timeouts.silence:.1f} s", now)
            elif link.name in overdue:
                self._drop(link, f"a request was not answered in {self._timeouts.request:.0f} s", now)
            elif link.live and now - link.pinged_at >= self._timeouts.heartbeat:
                link.pinged_at = now
                link.connection.post(messages.Ping())

    def _check_targets(self, now: float) -> None:
        """No live target is an error only once something is wanted, and after a long wait."""
        if self._scheduler.targets or not self._window.wanting:
            self._without_target_since = now
            self._waiting = False
            return
        if not self._waiting:
            self._waiting = True
            logger.warning("waiting for targets (%s)", self._last_cause)
        if now - self._without_target_since > self._timeouts.no_target:
            raise TemporaryError(
                f"no target has been there for {self._timeouts.no_target:.0f} s ({self._last_cause}); "
                "start targets, or raise training.targetWaitSeconds"
            )
