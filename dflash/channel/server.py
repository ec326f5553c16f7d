"""The target's side: takes requests from any number of drafters, packs them, captures, sends.

Three kinds of threads. The control thread owns the ZeroMQ socket and every decision about links. The
thread that calls `serve` captures: batches by token budget, oldest request first, across drafters. One
sender thread a link copies states into a buffer and sends it, so that sending overlaps with the next
capture. A link has at most two batches that are not yet sent; with both full it is passed over, so a
slow or stuck drafter bounds its own memory and delays nobody.
"""

import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]
from zmq.auth.thread import ThreadAuthenticator

from dflash.channel import messages
from dflash.channel.interface import Identity, ServerStats
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.link import (
    TARGET_RANK,
    Backend,
    TensorLink,
    host_store,
    listen,
    own_stream,
    resolve_backend,
)
from dflash.channel.mailbox import Mailbox
from dflash.channel.packing import pick
from dflash.channel.shares import RecentShare
from dflash.channel.threads import join_all
from dflash.channel.wire import checksum, describe_mismatch, flat_bytes, pack
from dflash.errors import ConfigurationError, DflashError
from dflash.model.states import States

logger = logging.getLogger(__name__)

Capture = Callable[[list[NDArray[np.int32]]], list[States]]

_BUFFERS = 2
"""Batches per link that are captured and not yet sent: one on the wire, one behind it."""
_FAILURES_IN_A_ROW = 8
"""Samples refused one after another, none captured between them: then the fault is the target's own."""
_MOST_PENDING = 65_536
"""Requests of one drafter that wait; an honest one never comes near."""
_POLL_MS = 500
_GOODBYE_SECONDS = 3.0
"""Time for threads to end; one that is stuck in a transfer is left behind."""


@dataclass(frozen=True)
class _Pending:
    """A request that waits for its turn."""

    arrival: int
    item: messages.Item
    ids: NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Length of the sample."""
        return len(self.ids)


@dataclass
class _Job:
    """States of one link's share of a batch, on their way to the wire."""

    items: list[messages.Item]
    states: list[States]
    captured: torch.cuda.Event | None


@dataclass(frozen=True)
class _Sending:
    """A send that is under way, and the buffer it reads."""

    work: Work
    flat: Tensor


@dataclass(eq=False)
class _Link:
    """One drafter, as the target knows it. Guarded by the server's condition."""

    name: str
    route: bytes
    drafter: int
    attempt: int
    instance: str
    last_heard: float
    jobs: "queue.SimpleQueue[_Job | None]" = field(default_factory=queue.SimpleQueue)
    pending: deque[_Pending] = field(default_factory=deque)
    joined: bool = False
    unsent: int = 0
    closed: bool = False

    @property
    def label(self) -> str:
        """How logs call it."""
        return f"drafter-{self.drafter} (attempt {self.attempt})"


class HiddenStateServer:
    """Serves hidden states until stopped.

    server = HiddenStateServer(capture, identity, run=..., keys=keys, authority=authority)
    server.start()                       # from here on server.port is known: publish the member
    server.serve()                       # captures in this thread until stop()
    """

    def __init__(
        self,
        capture: Capture,
        identity: Identity,
        *,
        run: str,
        keys: KeyPair,
        authority: Authority,
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        token_budget: int = 16_384,
        backend: str = "auto",
        device: torch.device | None = None,
        checksum_every: int = 32,
        join_timeout: float = 30.0,
        transfer_timeout: float = 60.0,
        silence_timeout: float = 30.0,
    ) -> None:
        """`capture` maps ids (int32 [T] each) to their states, in order; it is called in `serve`'s thread.

        `run` names what is trained (a drafter of another run is refused). `advertise` is this machine's
        address for the tensors, where `bind` is a wildcard. `token_budget` bounds a batch (one longer
        sample goes alone). Every `checksum_every`-th send of a link carries a checksum; 0 is never. A
        drafter that says nothing for `silence_timeout` seconds is dropped.
        """
        self._capture = capture
        self._identity = identity
        self._run = run
        self._keys = keys
        self._authority = authority
        self._bind = bind
        self._port = port
        self._address = advertise or bind
        self._token_budget = token_budget
        self._device = device or torch.device("cpu")
        self._backend: Backend = resolve_backend(backend, self._device)
        self._checksum_every = checksum_every
        self._join_timeout = join_timeout
        self._transfer_timeout = transfer_timeout
        self._silence_timeout = silence_timeout

        self._changed = threading.Condition()
        self._links: dict[bytes, _Link] = {}
        self._highest_attempt = 0
        self._arrivals = 0
        self._stopping = False
        self._senders: list[threading.Thread] = []
        self._outbox: Mailbox[tuple[bytes, messages.FromTarget]] = Mailbox()
        self._context = zmq.Context()
        self._control: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._busy = RecentShare(time.monotonic())
        self._counts: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._seconds = {"capture": 0.0, "idle": 0.0, "blocked": 0.0}

    # The owner's side

    @property
    def port(self) -> int:
        """The control port; known after `start`."""
        return self._port

    def start(self) -> None:
        """Listen. Drafters may connect from now on; their requests wait for `serve`.

        ConfigurationError if `bind` or `advertise` is not an address of this machine.
        """
        try:
            listen(self._address).close()
        except OSError as error:
            raise ConfigurationError(
                f"{self._address} is not an address of this machine ({error.strerror}): advertise one on "
                "which drafters reach it"
            ) from None
        authenticator = ThreadAuthenticator(self._context, log=logging.getLogger("dflash.channel.zap"))
        authenticator.start()
        authenticator.configure_curve_callback(domain="*", credentials_provider=self._authority)
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.ipv6 = ":" in self._bind
        router.curve_server = True
        router.curve_publickey = self._keys.public.encode()
        router.curve_secretkey = self._keys.secret.encode()
        router.maxmsgsize = messages.MAX_FRAME_BYTES
        router.router_mandatory = True  # an error for who is gone, instead of silence
        host = f"[{self._bind}]" if ":" in self._bind else self._bind
        router.bind(f"tcp://{host}:{self._port or '*'}")
        self._port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._control = threading.Thread(
            target=self._run_control, args=(router, authenticator), name="channel-control", daemon=True
        )
        self._control.start()

    def serve(self) -> None:
        """Capture for whoever asks, until `stop`. Raises what ended the control thread, if it failed."""
        failures = 0
        try:
            while (batch := self._next_batch()) is not None:
                began = time.monotonic()
                failures = self._serve_batch(batch, failures)
                ended = time.monotonic()
                with self._changed:
                    self._seconds["capture"] += ended - began
                    self._busy.add(began, ended)
        finally:
            self.stop()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `serve` after its current batch, tell the drafters, free everything. May be called twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._outbox.put((b"", messages.Closed(text="the target stops")))
        if self._control is not None and self._control is not threading.current_thread():
            self._control.join(timeout=2 * _GOODBYE_SECONDS)

    def request_stop(self) -> None:
        """Like `stop`, without waiting: for signal handlers."""
        self._stopping = True
        self._outbox.put((b"", messages.Closed(text="the target stops")))

    def stats(self) -> ServerStats:
        """Counters and the present state; from any thread."""
        with self._changed:
            return ServerStats(
                links=sum(link.joined for link in self._links.values()),
                pending=sum(len(link.pending) for link in self._links.values()),
                samples=self._counts["samples"],
                tokens=self._counts["tokens"],
                batches=self._counts["batches"],
                bytes_sent=self._counts["bytes"],
                capture_seconds=self._seconds["capture"],
                idle_seconds=self._seconds["idle"],
                blocked_seconds=self._seconds["blocked"],
                idle_share=1.0 - self._busy.share(time.monotonic()),
                refused=self._counts["refused"],
                links_refused=self._counts["links_refused"],
                links_dropped=self._counts["links_dropped"],
                causes=dict(self._causes),
            )

    # Capturing

    def _next_batch(self) -> list[tuple[_Link, _Pending]] | None:
        """Wait for requests and take the oldest, up to the token budget; None at the end."""
        with self._changed:
            while not self._stopping:
                ready = [k for k in self._links.values() if k.joined and k.unsent < _BUFFERS]
                batch = pick({link: link.pending for link in ready}, self._token_budget)
                for link in {link for link, _ in batch}:
                    link.unsent += 1
                if batch:
                    return batch
                reason = "blocked" if any(k.joined and k.pending for k in self._links.values()) else "idle"
                began = time.monotonic()
                self._changed.wait(1.0)
                self._seconds[reason] += time.monotonic() - began
        return None

    def _serve_batch(self, batch: list[tuple[_Link, _Pending]], failures: int) -> int:
        """Capture a batch and pass it to the senders; the number of failures in a row is carried on."""
        captured: list[tuple[_Link, messages.Item, States]] = []
        outcome = self._try_capture([pending for _, pending in batch])
        if isinstance(outcome, str) and len(batch) > 1:
            # One sample may spoil a batch: each alone, so that only the guilty is refused.
            outcomes = [self._try_capture([pending]) for _, pending in batch]
        else:
            outcomes = [outcome] if isinstance(outcome, str) else [[states] for states in outcome]
        for (link, pending), single in zip(batch, outcomes, strict=True):
            if isinstance(single, str):
                failures += 1
                self._refuse(link, pending, single)
            else:
                failures = 0
                captured.append((link, pending.item, single[0]))
        self._dispatch(batch, captured)
        if failures >= _FAILURES_IN_A_ROW:
            raise DflashError(
                f"the target failed on {failures} samples in a row, last with: {single}; it ends so that a "
                "fresh one can take its place; if that fails too, look at the target's log"
            )
        return failures

    def _try_capture(self, samples: list[_Pending]) -> list[States] | str:
        """States of all samples, or the text of what went wrong."""
        try:
            states = self._capture([sample.ids for sample in samples])
        except Exception as error:
            logger.warning("capturing %d samples failed: %s", len(samples), error, exc_info=True)
            return f"{type(error).__name__}: {error}"[:2000]
        if len(states) != len(samples):
            return f"the capture returned {len(states)} states for {len(samples)} samples"
        for sample, state in zip(samples, states, strict=True):
            if (problem := describe_mismatch(state, sample.item.length, self._identity)) is not None:
                return f"sample {sample.item.sample_id!r}: {problem}"
        return states

    def _refuse(self, link: _Link, pending: _Pending, text: str) -> None:
        with self._changed:
            self._counts["refused"] += 1
        self._outbox.put((link.route, messages.Refused(index=pending.item.index, text=text)))

    def _dispatch(
        self, batch: list[tuple[_Link, _Pending]], captured: list[tuple[_Link, messages.Item, States]]
    ) -> None:
        """Give each link its share; a link whose samples were all refused has its buffer back."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        with self._changed:
            for link in {link for link, _ in batch}:
                own = [(item, states) for owner, item, states in captured if owner is link]
                if link.closed or not own:
                    link.unsent -= 1
                    continue
                link.jobs.put(_Job([item for item, _ in own], [states for _, states in own], event))
            self._counts["batches"] += 1
            self._counts["samples"] += len(captured)
            self._counts["tokens"] += sum(item.length for _, item, _ in captured)

    # One sender thread a link

    def _run_sender(self, link: _Link, store: TCPStore) -> None:
        try:
            tensors = TensorLink(
                store,
                link.name,
                TARGET_RANK,
                address=self._address,
                backend=self._backend,
                timeout=self._join_timeout,
                device=self._device,
            )
            tensors.set_timeout(self._transfer_timeout)
            with self._changed:
                link.joined = not link.closed
                self._changed.notify_all()
            with own_stream(self._device) as stream:
                self._send_jobs(link, tensors, stream)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this link and no other
            self._drop(link, f"sending failed: {_first_line(error)}")

    def _send_jobs(self, link: _Link, tensors: TensorLink, stream: torch.cuda.Stream | None) -> None:
        """Copy one batch into its buffer while the one before it is on the wire."""
        buffers = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)]
        under_way: _Sending | None = None
        for number in itertools.count():
            if under_way is not None and link.jobs.empty():
                self._finish(link, tensors, under_way)
                under_way = None
            job = link.jobs.get()
            if job is None:
                return
            size = flat_bytes(sum(item.length for item in job.items), self._identity)
            turn = number % _BUFFERS
            if buffers[turn].numel() < size:
                buffers[turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
            if stream is not None and job.captured is not None:
                stream.wait_event(job.captured)
            flat = pack(job.states, self._identity, number, buffers[turn])
            if self._device.type == "cuda" and self._backend == "gloo":
                flat = flat.cpu()
            if stream is not None:
                stream.synchronize()  # the states are copied, so they may be freed
            items = job.items
            del job
            if under_way is not None:
                self._finish(link, tensors, under_way)
            under_way = self._begin(link, tensors, items, number, flat)

    def _begin(
        self, link: _Link, tensors: TensorLink, items: list[messages.Item], number: int, flat: Tensor
    ) -> _Sending:
        due = self._checksum_every > 0 and number % self._checksum_every == 0
        crc = checksum(flat) if due else None
        self._outbox.put((link.route, messages.Batch(number=number, items=items, checksum=crc)))
        return _Sending(self._transmit(tensors, flat), flat)

    def _transmit(self, tensors: TensorLink, flat: Tensor) -> Work:
        """The one place where bytes leave; tests of faulty targets override it."""
        return tensors.start_send(flat)

    def _finish(self, link: _Link, tensors: TensorLink, sending: _Sending) -> None:
        tensors.finish(sending.work)
        with self._changed:
            link.unsent -= 1
            self._counts["bytes"] += sending.flat.numel()
            self._changed.notify_all()

    # The control thread

    def _run_control(self, router: "zmq.Socket[bytes]", authenticator: ThreadAuthenticator) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._outbox.fileno(), zmq.POLLIN)
        try:
            turned_at = time.monotonic()
            while not self._stopping:
                poller.poll(_POLL_MS)
                held_up, turned_at = time.monotonic() - turned_at, time.monotonic()
                for route, message in self._outbox.drain():
                    self._send(router, route, message)
                while router.poll(0):
                    self._receive(router)
                self._drop_silent(held_up if held_up > 2 * _POLL_MS / 1000 else 0.0)
        except BaseException as error:
            logger.exception("the control thread failed")
            self._failure = error
        finally:
            with self._changed:
                self._stopping = True
                open_links = list(self._links.values())
                self._changed.notify_all()
            for link in open_links:
                self._drop(link, "the target stops")
            for route, message in self._outbox.drain():
                self._send(router, route, message)
            router.close(linger=500)
            authenticator.stop()
            self._context.term()
            self._outbox.close()
            join_all(self._senders, _GOODBYE_SECONDS)

    def _send(self, router: "zmq.Socket[bytes]", route: bytes, message: messages.FromTarget) -> None:
        if not route:
            return
        try:
            router.send_multipart([route, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            link = self._links.get(route)
            if link is not None:
                gone = error.errno == zmq.EHOSTUNREACH
                self._drop(link, "the drafter is gone" if gone else f"control: {error.strerror}", tell=False)

    def _receive(self, router: "zmq.Socket[bytes]") -> None:
        route, *frames = router.recv_multipart(zmq.NOBLOCK)
        link = self._links.get(route)
        try:
            if not 1 <= len(frames) <= 2:
                raise messages.MessageError(f"{len(frames)} frames in one message")
            message = messages.decode_from_drafter(frames[0])
            if isinstance(message, messages.Hello):
                self._hello(router, route, message)
            elif link is None:
                if not isinstance(message, messages.Bye):
                    self._send(router, route, messages.Closed(text="no such link here"))
            else:
                link.last_heard = time.monotonic()
                if isinstance(message, messages.Ask):
                    self._ask(link, message, frames[1] if len(frames) > 1 else b"")
                elif isinstance(message, messages.Ping):
                    with self._changed:
                        idle = 1.0 - self._busy.share(time.monotonic())
                    self._send(router, route, messages.Pong(idle_share=idle))
                else:
                    self._drop(link, "the drafter is done", tell=False, clean=True)
        except messages.MessageError as error:
            self._note(f"bad control message: {error}")
            if link is not None:
                self._drop(link, f"bad control message: {error}")
            else:
                self._send(router, route, messages.Closed(text=f"bad control message: {error}"))

    def _hello(self, router: "zmq.Socket[bytes]", route: bytes, hello: messages.Hello) -> None:
        denied = self._judge(hello)
        if denied is not None:
            with self._changed:
                self._counts["links_refused"] += 1
            self._note(f"refused: {denied.code}")
            logger.warning("refused drafter-%d (attempt %d): %s", hello.index, hello.attempt, denied.text)
            self._send(router, route, denied)
            return
        self._highest_attempt = max(self._highest_attempt, hello.attempt)
        for other in list(self._links.values()):
            if other.attempt < hello.attempt:
                self._drop(other, f"attempt {hello.attempt} has taken over")
            elif other.drafter == hello.index:
                self._drop(other, "the drafter opened a new link")
        try:
            store = host_store(self._address)
        except (OSError, RuntimeError) as error:  # out of descriptors or ports: others go on
            self._note(f"no rendezvous for a link: {error}")
            self._send(router, route, messages.Closed(text=f"no rendezvous: {_first_line(error)}"))
            return
        link = _Link(hello.link, route, hello.index, hello.attempt, hello.instance, time.monotonic())
        with self._changed:
            self._links[route] = link
        sender = threading.Thread(
            target=self._run_sender, args=(link, store), name=f"channel-send-{hello.index}", daemon=True
        )
        sender.start()
        self._senders = [thread for thread in self._senders if thread.is_alive()] + [sender]
        self._send(
            router,
            route,
            messages.Welcome(
                host=self._address, store_port=store.port, group=link.name, token_budget=self._token_budget
            ),
        )
        logger.info("linked with %s", link.label)

    def _judge(self, hello: messages.Hello) -> messages.Denied | None:
        """Why a drafter may not join, or None."""
        if hello.version != messages.VERSION:
            text = f"the target speaks version {messages.VERSION} of the channel, the drafter {hello.version}"
            return messages.Denied(code="version", text=text)
        if hello.run != self._run:
            return messages.Denied(code="run", text=f"the target serves run {self._run}, not {hello.run}")
        if hello.backend != self._backend:
            text = f"the target sends by {self._backend}, the drafter wants {hello.backend}"
            return messages.Denied(code="backend", text=text)
        offered = Identity(hello.fingerprint, tuple(hello.taps), hello.hidden_size, hello.dtype, hello.final)
        for name in ("fingerprint", "taps", "hidden_size", "dtype", "final"):
            have, want = getattr(self._identity, name), getattr(offered, name)
            if have != want:
                text = f"{name} differs: the target has {have}, the drafter expects {want}"
                return messages.Denied(code="identity", text=text)
        if hello.attempt < self._highest_attempt:
            text = f"attempt {self._highest_attempt} is running; attempt {hello.attempt} is over"
            return messages.Denied(code="superseded", text=text)
        return None

    def _ask(self, link: _Link, ask: messages.Ask, frame: bytes) -> None:
        samples = messages.decode_ids(ask, frame)
        with self._changed:
            if link.closed:
                return
            if len(link.pending) + len(samples) > _MOST_PENDING:
                raise messages.MessageError(f"more than {_MOST_PENDING:,} requests are waiting")
            for item, ids in zip(ask.items, samples, strict=True):
                link.pending.append(_Pending(self._arrivals, item, ids))
                self._arrivals += 1
            self._changed.notify_all()

    def _drop_silent(self, late: float) -> None:
        """Drop who has said nothing. `late`: how long this thread itself was held up, which is not theirs."""
        limit = time.monotonic() - self._silence_timeout
        for link in list(self._links.values()):
            link.last_heard += late
            if link.last_heard < limit:
                self._drop(link, f"nothing heard from the drafter for {self._silence_timeout:.0f} s")

    def _drop(self, link: _Link, cause: str, *, tell: bool = True, clean: bool = False) -> None:
        """End a link and forget its requests. From any thread; the second call does nothing."""
        with self._changed:
            if link.closed:
                return
            link.closed = True
            link.joined = False
            link.pending.clear()
            self._links.pop(link.route, None)
            if not clean and not self._stopping:
                self._counts["links_dropped"] += 1
                self._causes[cause] += 1
            link.jobs.put(None)
            self._changed.notify_all()
        logger.log(logging.INFO if clean else logging.WARNING, "link with %s ended: %s", link.label, cause)
        if tell:
            self._outbox.put((link.route, messages.Closed(text=cause)))

    def _note(self, cause: str) -> None:
        with self._changed:
            self._causes[cause] += 1


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
