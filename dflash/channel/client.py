"""The drafter's side: asks targets for samples, checks what arrives, hands it over in order.

Threads. The loop owns all sockets and the scheduler, so every decision is made in one place. One
receiver a link waits for tensors and checks them. One thread polls discovery, and while a stream runs
one reads the requests ahead. The consumer's thread only waits for the next reply.

What ends a link: a lost connection, silence on the control connection, a request past its deadline, a
failed or malformed transfer, repeated bad replies. Its outstanding requests go to other targets at
once, and the target is tried again with growing pauses, or at once if it is a new process.
"""

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import zmq
from torch import Tensor
from torch.distributed import Work
from zmq.utils.monitor import recv_monitor_message

from dflash.channel import messages
from dflash.channel.buffers import BufferPool
from dflash.channel.interface import (
    ClientStats,
    Identity,
    Member,
    Reply,
    Request,
    TargetStats,
)
from dflash.channel.keys import KeyPair
from dflash.channel.link import (
    DRAFTER_RANK,
    Backend,
    TensorLink,
    join_store,
    local_address_towards,
    own_stream,
    resolve_backend,
)
from dflash.channel.mailbox import Mailbox
from dflash.channel.scheduler import Scheduler
from dflash.channel.shares import RecentShare
from dflash.channel.threads import join_all
from dflash.channel.verify import find_faults
from dflash.channel.wire import checksum, flat_bytes, unpack
from dflash.errors import DflashError, Preempted, TemporaryError
from dflash.model.states import States

logger = logging.getLogger(__name__)

Discovery = Callable[[], list[Member]]

_BATCHES_AHEAD = 3
"""Token budgets outstanding at one target: on the wire, being captured, next in line."""
_FAULTS_PER_LINK = 3
"""Transfers with a bad reply until a link ends."""
_LOST_IN_A_ROW = 16
"""Samples that no target could give, with none delivered between them: then nothing works any more."""
_PAUSE_SECONDS = (0.5, 10.0)
"""First and longest pause before a target that failed is tried again."""
_GOODBYE_SECONDS = 3.0
"""Time for threads to end; one that is stuck in a transfer is left behind."""
_ENDINGS: dict[int, str] = {
    zmq.Event.DISCONNECTED: "the connection was lost",
    zmq.Event.CLOSED: "nothing listens there",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not let this drafter's key in",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it does not hold the key it published",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the connection was not accepted",
}
"""What a socket's monitor may report that ends a link."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Every wait of the client has one."""

    hello: float = 15.0
    """From connecting until the first tensors could flow."""
    heartbeat: float = 0.5
    """Between two pings."""
    silence: float = 20.0
    """Without a word from a target: it hangs, or the network is cut."""
    request: float = 180.0
    """From asking for a sample until it is here."""
    transfer: float = 60.0
    """For one transfer that was announced."""
    discovery: float = 1.0
    """Between two looks at who the targets are."""
    no_target: float = 600.0
    """Without any live target: then TemporaryError."""


@dataclass(eq=False)
class _Link:
    """One target, as the drafter knows it. Owned by the loop."""

    member: Member
    name: str
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    deadline: float
    inbox: "queue.SimpleQueue[messages.Batch | None]" = field(default_factory=queue.SimpleQueue)
    live: bool = False
    capacity: int = 0
    last_heard: float = 0.0
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


@dataclass(frozen=True)
class _Joined:
    link: _Link


@dataclass(frozen=True)
class _Arrived:
    link: _Link
    items: Sequence[messages.Item]
    states: Sequence[States | str]
    """Per sample its states, or what is wrong with them."""
    size: int


@dataclass(frozen=True)
class _Failed:
    link: _Link
    cause: str


@dataclass(frozen=True)
class _Found:
    members: Sequence[Member]


@dataclass(frozen=True)
class _Submitted:
    request: Request | None
    """None: there are no more."""


@dataclass(frozen=True)
class _Transfer:
    """A receive that is under way. Owned by a receiver."""

    batch: messages.Batch
    flat: Tensor
    work: Work


class _End:
    """Marks the end of a stream."""


_Event = _Joined | _Arrived | _Failed | _Found | _Submitted


class HiddenStateClient:
    """Streams replies in the order of requests.

    with HiddenStateClient(discovery, identity, run=..., attempt=1, index=0, keys=keys) as client:
        for reply in client.stream(requests):
            train(reply.request, reply.states)
    """

    def __init__(
        self,
        discovery: Discovery,
        identity: Identity,
        *,
        run: str,
        attempt: int,
        index: int,
        keys: KeyPair,
        queue_depth: int = 60,
        backend: str = "auto",
        device: torch.device | None = None,
        timeouts: Timeouts | None = None,
        max_refusals: int = 3,
        address: str | None = None,
    ) -> None:
        """`discovery` lists members, is polled in a thread of its own, and may fail for a while.

        `queue_depth` bounds the samples requested or ready. `device` is where the states are received
        (a GPU with NCCL). A sample refused `max_refusals` times comes without states. `address`
        is this machine's for the tensors; by default the one that the route to the target starts from.
        """
        self._discovery = discovery
        self._identity = identity
        self._run = run
        self._attempt = attempt
        self._index = index
        self._keys = keys
        self._depth = queue_depth
        self._device = device or torch.device("cpu")
        self._backend: Backend = resolve_backend(backend, self._device)
        self._timeouts = timeouts or Timeouts()
        self._address = address
        self._instance = uuid.uuid4().hex

        self._lock = threading.Lock()
        self._scheduler = Scheduler(self._timeouts.request, max_refusals)
        self._events: Mailbox[_Event] = Mailbox()
        self._buffers = BufferPool(self._device)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._links: dict[str, _Link] = {}
        self._members: Sequence[Member] = ()
        self._trials: dict[str, _Trials] = {}
        self._requests: dict[int, Request] = {}
        self._replies: dict[int, Reply] = {}
        self._output: queue.SimpleQueue[Reply | _End | BaseException] = queue.SimpleQueue()
        self._slots = threading.Semaphore(queue_depth)
        self._stopping = threading.Event()
        self._without_target_since = time.monotonic()
        self._waiting = False
        self._turned_at = time.monotonic()
        self._last_cause = "none was found"
        self._wait_seconds = 0.0
        self._waits: RecentShare | None = None
        self._lost_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run_loop, name="channel-loop", daemon=True),
            threading.Thread(target=self._run_discovery, name="channel-discovery", daemon=True),
        ]
        self._streaming = False
        self._all_submitted = False
        self._receivers: list[threading.Thread] = []
        for thread in self._threads:
            thread.start()

    # The consumer's side

    def stream(self, requests: Iterator[Request]) -> Iterator[Reply]:
        """Replies in the order of `requests`, which is read ahead in another thread.

        A sample that no target could give comes in its place without states and says why. Raises
        DflashError when there are many of these in a row, TemporaryError when there is no live target for
        too long or a later attempt has taken over, and whatever `requests` raises. Streams may follow one
        another, each after the other's end; one that was left in the middle cannot be followed.
        """
        if self._streaming:
            raise ValueError("the last stream of this client has not ended: open another client")
        self._streaming = True
        over = threading.Event()
        feeder = threading.Thread(
            target=self._feed, args=(iter(requests), over), name="channel-requests", daemon=True
        )
        feeder.start()
        return self._consume(over)

    def _consume(self, over: threading.Event) -> Iterator[Reply]:
        try:
            while True:
                began = time.monotonic()
                item = self._output.get()
                self._count_wait(began)
                if isinstance(item, _End):
                    self._streaming = False
                    return
                if isinstance(item, BaseException):
                    self._output.put(item)  # a failed client stays failed
                    raise item
                self._slots.release()
                self._counts["delivered"] += 1
                yield item
        finally:
            over.set()
            if self._streaming:
                self._slots.release()  # lets the feeder see that it is over

    def interrupt(self) -> None:
        """Make the stream raise Preempted once it has handed over what is here. For signal handlers.

        Meant for a consumer that must end and may be waiting for targets that do not come; others of its
        group may be waiting for it, so it is not for the first second of a stop that was agreed on.
        """
        self._output.put(Preempted("stopped while waiting for hidden states"))

    def stats(self) -> ClientStats:
        """Counters and the present state; from any thread."""
        now = time.monotonic()
        with self._lock:
            live = [link for link in self._links.values() if link.live]
            return ClientStats(
                status=self._status(bool(live)),
                requested=self._counts["requested"],
                reissued=self._counts["reissued"],
                delivered=self._counts["delivered"],
                depth=self._counts["submitted"] - self._counts["delivered"],
                ready=len(self._replies) + self._output.qsize(),
                bytes_received=self._counts["bytes"],
                wait_seconds=self._wait_seconds,
                wait_share=self._waits.share(now) if self._waits is not None else 0.0,
                links_lost=self._counts["links_lost"],
                bad_replies=self._counts["bad_replies"],
                refusals=self._counts["refusals"],
                causes=dict(self._causes),
                targets=tuple(
                    TargetStats(
                        link.member.name,
                        link.live,
                        *self._scheduler.outstanding(name),
                        link.delivered,
                        link.idle_share,
                    )
                    for name, link in self._links.items()
                ),
            )

    def close(self) -> None:
        """Say goodbye to all targets and free everything. May be called twice."""
        self._stopping.set()
        self._slots.release()  # a feeder that waits for its turn sees that it is over
        self._events.wake()
        join_all(self._threads, _GOODBYE_SECONDS)
        join_all(self._receivers, _GOODBYE_SECONDS)

    def __enter__(self) -> "HiddenStateClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _status(self, live: bool) -> str:
        if live:
            return "streaming"
        return f"waiting for targets ({self._last_cause})"

    def _count_wait(self, began: float) -> None:
        """Time before the first sample is start-up, not waiting."""
        now = time.monotonic()
        with self._lock:
            if self._waits is None:
                self._waits = RecentShare(now)
            else:
                self._wait_seconds += now - began
                self._waits.add(began, now)

    # Reading ahead

    def _feed(self, requests: Iterator[Request], over: threading.Event) -> None:
        try:
            for request in requests:
                self._slots.acquire()
                if over.is_set() or self._stopping.is_set():
                    return
                self._events.put(_Submitted(request))
            self._events.put(_Submitted(None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer's thread
            self._output.put(error)

    # Discovery

    def _run_discovery(self) -> None:
        failing = False
        while not self._stopping.is_set():
            try:
                self._events.put(_Found(self._discovery()))
                failing = False
            except Exception as error:  # noqa: BLE001 - targets already known go on
                if not failing:
                    logger.warning("targets could not be looked up: %s", error)
                failing = True
            self._stopping.wait(self._timeouts.discovery)

    # The loop

    def _run_loop(self) -> None:
        self._poller.register(self._events.fileno(), zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                woken = dict(self._poller.poll(int(self._timeouts.heartbeat * 500)))
                with self._lock:
                    self._turn(woken, time.monotonic())
            self._output.put(DflashError("the channel was closed while its stream was read"))
        except BaseException as error:
            if not isinstance(error, DflashError):
                logger.exception("the channel's loop failed")
            self._output.put(error)
        finally:
            with self._lock:
                self._stopping.set()
                for link in list(self._links.values()):
                    self._post(link, messages.Bye())
                    self._forget(link, linger=200)
            self._context.term()
            self._events.close()

    def _turn(self, woken: dict[object, int], now: float) -> None:
        """One round: what came in, what is due, who is asked for what."""
        self._excuse(now)
        for event in self._events.drain():
            self._handle(event, now)
        for link in list(self._links.values()):
            if link.socket in woken:
                self._read(link, now)  # before the connection's end: the target may have said why
            if link.monitor in woken and self._links.get(link.name) is link:
                self._watch(link, now)
        self._check_times(now)
        self._connect(now)
        self._ask(now)
        self._deliver()
        self._check_targets(now)

    def _excuse(self, now: float) -> None:
        """If this thread itself was held up (a stopped process, no processor), nobody else was silent."""
        held_up = now - self._turned_at
        self._turned_at = now
        if held_up > 4 * self._timeouts.heartbeat:
            for link in self._links.values():
                link.last_heard += held_up

    def _handle(self, event: _Event, now: float) -> None:
        if isinstance(event, _Submitted):
            self._submit(event.request)
        elif isinstance(event, _Arrived):
            self._arrived(event, now)
        elif isinstance(event, _Found):
            self._members = [member for member in event.members if member.role == "target"]
        elif self._links.get(event.link.name) is not event.link:
            return  # of a link that has ended
        elif isinstance(event, _Joined):
            event.link.live = True
            self._scheduler.join(event.link.name, event.link.capacity)
            logger.info("linked with %s", event.link.member.name)
        else:
            self._drop(event.link, event.cause, now)

    def _submit(self, request: Request | None) -> None:
        if request is None:
            self._all_submitted = True
            return
        self._counts["submitted"] += 1
        self._requests[self._scheduler.submit(len(request.ids))] = request

    def _arrived(self, event: _Arrived, now: float) -> None:
        link = event.link
        self._counts["bytes"] += event.size
        if self._links.get(link.name) is not link:
            return  # dropped meanwhile: its samples were asked for elsewhere
        fault = None
        for item, states in zip(event.items, event.states, strict=True):
            link.announced.discard(item.index)
            if isinstance(states, str):
                fault = states
                self._counts["bad_replies"] += 1
                self._refused(link, item.index, states, now)
            elif self._scheduler.deliver(link.name, item.index, now):
                link.delivered += 1
                self._lost_in_a_row = 0
                self._replies[item.index] = Reply(self._requests[item.index], states)
        if fault is None:
            self._trials.pop(link.member.name, None)
            return
        link.faults += 1
        if link.faults >= _FAULTS_PER_LINK:
            self._drop(link, f"{link.faults} bad transfers, the last one: {fault}", now)

    def _refused(self, link: _Link, index: int, text: str, now: float) -> None:
        """One sample was not to be had from one target."""
        request = self._requests[index]
        logger.warning("%s: sample %r: %s", link.member.name, request.sample_id, text)
        self._causes[text] += 1
        if self._scheduler.refuse(link.name, index, now):
            self._scheduler.give_up(index)
            fault = (
                f"sample {request.sample_id!r} was refused {self._scheduler.refusals(index)} times, last by "
                f"{link.member.name}: {text}; look at the target's log, and at the sample's row"
            )
            self._replies[index] = Reply(request, None, fault)
            self._lost_in_a_row += 1
            if self._lost_in_a_row >= _LOST_IN_A_ROW:
                raise DflashError(f"{self._lost_in_a_row} samples in a row could not be had: {fault}")

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
        link_socket = self._context.socket(zmq.DEALER)
        link_socket.linger = 0
        link_socket.ipv6 = True
        link_socket.reconnect_ivl = -1  # a lost connection is a lost link
        link_socket.maxmsgsize = messages.MAX_HEADER_BYTES
        link_socket.curve_publickey = self._keys.public.encode()
        link_socket.curve_secretkey = self._keys.secret.encode()
        link_socket.curve_serverkey = member.public_key.encode()
        monitor = link_socket.get_monitor_socket(sum(_ENDINGS))
        name = f"{member.name}/{uuid.uuid4().hex}"
        link = _Link(member, name, link_socket, monitor, now + self._timeouts.hello, last_heard=now)
        self._links[name] = link
        self._poller.register(link_socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        host = f"[{member.host}]" if ":" in member.host else member.host
        try:
            link_socket.connect(f"tcp://{host}:{member.control_port}")
        except zmq.ZMQError as error:
            self._drop(link, f"connecting to {member.host}:{member.control_port}: {error.strerror}", now)
            return
        identity = self._identity
        self._post(
            link,
            messages.Hello(
                version=messages.VERSION,
                run=self._run,
                attempt=self._attempt,
                index=self._index,
                instance=self._instance,
                link=name,
                fingerprint=identity.fingerprint,
                taps=list(identity.taps),
                hidden_size=identity.hidden_size,
                dtype=identity.dtype,
                final=identity.final,
                backend=self._backend,
            ),
        )

    def _watch(self, link: _Link, now: float) -> None:
        """The connection itself has ended, or was not allowed."""
        event = recv_monitor_message(link.monitor, zmq.NOBLOCK)
        self._drop(link, _ENDINGS.get(event["event"], "the connection was lost"), now)

    def _read(self, link: _Link, now: float) -> None:
        """All messages that are here, until the link ends or there are no more."""
        while self._links.get(link.name) is link:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            link.last_heard = now
            try:
                if len(frames) != 1:
                    raise messages.MessageError(f"{len(frames)} frames in one message")
                self._message(link, messages.decode_from_target(frames[0]), now)
            except messages.MessageError as error:
                self._drop(link, f"bad control message: {error}", now)

    def _message(self, link: _Link, message: messages.FromTarget, now: float) -> None:
        if isinstance(message, messages.Welcome):
            if link.capacity:
                raise messages.MessageError("a second welcome")
            link.capacity = _BATCHES_AHEAD * message.token_budget
            receiver = threading.Thread(
                target=self._run_receiver,
                args=(link, message),
                name=f"channel-receive-{link.member.index}",
                daemon=True,
            )
            receiver.start()
            self._receivers = [thread for thread in self._receivers if thread.is_alive()] + [receiver]
        elif isinstance(message, messages.Batch):
            self._announced(link, message)
            link.inbox.put(message)
        elif isinstance(message, messages.Refused):
            if self._scheduler.holds(link.name, message.index) is None:
                raise messages.MessageError(f"sample {message.index} was refused without being asked for")
            self._counts["refusals"] += 1
            self._refused(link, message.index, message.text, now)
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

    def _announced(self, link: _Link, batch: messages.Batch) -> None:
        """A transfer must bring what was asked for, once, in the right lengths: else all is in doubt."""
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

    def _post(self, link: _Link, message: messages.FromDrafter, payload: bytes | None = None) -> None:
        frames = [messages.encode(message)] if payload is None else [messages.encode(message), payload]
        # The socket queues; when its queue is full the target hangs, and silence will end the link.
        with contextlib.suppress(zmq.Again):
            link.socket.send_multipart(frames, zmq.NOBLOCK)

    def _drop(self, link: _Link, cause: str, now: float) -> None:
        """End a link: its samples wait for other targets, and its target for a while."""
        was_live = link.live
        lost = self._forget(link)
        trials = self._trials.setdefault(link.member.name, _Trials(link.member.instance))
        first, longest = _PAUSE_SECONDS
        trials.not_before = now + min(longest, first * 2**trials.failures)
        trials.failures += 1
        self._last_cause = f"{link.member.name}: {cause}"
        self._causes[cause] += 1
        if was_live:
            self._counts["links_lost"] += 1
            logger.warning("%s lost (%s); %d samples go to others", link.member.name, cause, lost)
        elif trials.failures == 1:
            logger.warning("%s cannot be used: %s", link.member.name, cause)

    def _forget(self, link: _Link, linger: int = 0) -> int:
        """Free a link's sockets and thread; how many samples were outstanding there."""
        del self._links[link.name]
        lost = self._scheduler.leave(link.name)
        link.live = False
        link.inbox.put(None)
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        link.socket.disable_monitor()
        link.monitor.close(linger=0)
        link.socket.close(linger=linger)
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
                self._post(link, messages.Ping())

    def _check_targets(self, now: float) -> None:
        """No live target is an error only once something is wanted, and after a long wait."""
        wanted = self._scheduler.unfinished > self._scheduler.ready
        if self._scheduler.targets or not wanted:
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

    # Samples

    def _ask(self, now: float) -> None:
        """Send out what the scheduler assigns, one message a target."""
        asked: dict[str, list[int]] = {}
        for name, index in self._scheduler.assign(now):
            asked.setdefault(name, []).append(index)
            self._counts["requested" if self._scheduler.issued(index) == 1 else "reissued"] += 1
        for name, indexes in asked.items():
            for start in range(0, len(indexes), messages.MAX_SAMPLES):
                part = indexes[start : start + messages.MAX_SAMPLES]
                samples = [(index, self._requests[index]) for index in part]
                items = [messages.Item(index=i, sample_id=r.sample_id, length=len(r.ids)) for i, r in samples]
                payload = messages.encode_ids([request.ids for _, request in samples])
                self._post(self._links[name], messages.Ask(items=items), payload)

    def _deliver(self) -> None:
        for index in self._scheduler.take():
            del self._requests[index]
            self._output.put(self._replies.pop(index))
        if self._all_submitted and self._scheduler.unfinished == 0:
            self._all_submitted = False
            self._output.put(_End())

    # One receiver thread a link

    def _run_receiver(self, link: _Link, welcome: messages.Welcome) -> None:
        try:
            address = self._address or local_address_towards(welcome.host, welcome.store_port)
            store = join_store(welcome.host, welcome.store_port, self._timeouts.hello)
            tensors = TensorLink(
                store,
                welcome.group,
                DRAFTER_RANK,
                address=address,
                backend=self._backend,
                timeout=self._timeouts.hello,
                device=self._device,
            )
            tensors.set_timeout(self._timeouts.transfer)
            self._events.put(_Joined(link))
            with own_stream(self._device):
                self._receive_batches(link, tensors)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this link and no other
            self._events.put(_Failed(link, f"tensors: {(str(error) or repr(error)).splitlines()[0][:300]}"))

    def _receive_batches(self, link: _Link, tensors: TensorLink) -> None:
        """Receive one batch while the one before it is checked; None in the inbox is the end."""
        if (batch := link.inbox.get()) is None:
            return
        transfer = self._begin(tensors, batch)
        while True:
            tensors.finish(transfer.work)
            done, following = transfer, None
            if not link.inbox.empty():
                if (batch := link.inbox.get()) is None:
                    return
                following = self._begin(tensors, batch)
            if self._device.type == "cuda":  # the consumer's stream will use what this thread's received
                done.flat.record_stream(torch.cuda.default_stream(self._device))
            states = self._open_batch(done.batch, done.flat)
            self._events.put(_Arrived(link, done.batch.items, states, done.flat.numel()))
            del done, states, transfer  # nothing is held here while waiting: the consumer frees it
            if following is None:
                if (batch := link.inbox.get()) is None:
                    return
                following = self._begin(tensors, batch)
            transfer = following

    def _begin(self, tensors: TensorLink, batch: messages.Batch) -> "_Transfer":
        size = flat_bytes(sum(item.length for item in batch.items), self._identity)
        flat = self._buffers.take(size)
        return _Transfer(batch, flat, tensors.start_receive(flat))

    def _open_batch(self, batch: messages.Batch, flat: Tensor) -> list[States | str]:
        """Each sample's states, or what is wrong with them; RuntimeError if the stream is out of step."""
        lengths = [item.length for item in batch.items]
        states = unpack(flat, lengths, self._identity, batch.number)
        if states is None:
            raise RuntimeError("a transfer was shorter than announced, or not the one announced")
        if batch.checksum is not None and checksum(flat) != batch.checksum:
            return ["the checksum of its transfer is wrong"] * len(states)
        faults = find_faults(states, self._identity)
        return [fault or sample for fault, sample in zip(faults, states, strict=True)]
