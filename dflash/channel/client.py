"""The drafter's side: asks targets for samples, checks what arrives, hands it over in order.

Threads. The loop (`loop`) owns all sockets and makes every decision. Two threads a link receive tensors and
check them (`receipt`). One thread polls discovery, and while a stream runs one reads the requests ahead.
The consumer's thread only waits for the next reply.
"""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import torch

from dflash.channel.interface import ClientStats, Identity, Member, Reply, Request, Timeouts
from dflash.channel.keys import KeyPair
from dflash.channel.link import resolve_backend
from dflash.channel.loop import Found, Introduction, Loop, Submitted
from dflash.channel.receipt import ReceiveSettings
from dflash.channel.shares import RecentShare
from dflash.channel.threads import join_all
from dflash.channel.window import Window
from dflash.errors import DflashError, Preempted

logger = logging.getLogger(__name__)

Discovery = Callable[[], list[Member]]

_GOODBYE_SECONDS = 3.0
"""Time for threads to end; one that is stuck in a transfer is left behind."""


class _End:
    """Marks the end of a stream."""


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
        self._timeouts = timeouts or Timeouts()
        device = device or torch.device("cpu")
        self._lock = threading.Lock()
        """Guards the loop, its window and the waits."""
        self._window = Window(self._timeouts.request, max_refusals)
        self._loop = Loop(
            self._window,
            Introduction(run, attempt, index, uuid.uuid4().hex),
            keys,
            ReceiveSettings(identity, resolve_backend(backend, device), device, address, self._timeouts),
        )
        self._output: queue.SimpleQueue[Reply | _End | BaseException] = queue.SimpleQueue()
        self._slots = threading.Semaphore(queue_depth)
        self._stopping = threading.Event()
        self._streaming = False
        self._delivered = 0
        self._wait_seconds = 0.0
        self._waits: RecentShare | None = None
        self._threads = [
            threading.Thread(target=self._run_loop, name="channel-loop", daemon=True),
            threading.Thread(target=self._run_discovery, name="channel-discovery", daemon=True),
        ]
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
                self._delivered += 1
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
            counts = self._window.counts
            return ClientStats(
                status=self._loop.status(),
                requested=counts["requested"],
                reissued=counts["reissued"],
                delivered=self._delivered,
                depth=counts["submitted"] - self._delivered,
                ready=self._window.ready + self._output.qsize(),
                bytes_received=counts["bytes"],
                wait_seconds=self._wait_seconds,
                wait_share=self._waits.share(now) if self._waits is not None else 0.0,
                links_lost=counts["links_lost"],
                bad_replies=counts["bad_replies"],
                refusals=counts["refusals"],
                causes=dict(self._window.causes),
                targets=self._loop.targets(),
            )

    def close(self) -> None:
        """Say goodbye to all targets and free everything. May be called twice."""
        self._stopping.set()
        self._slots.release()  # a feeder that waits for its turn sees that it is over
        self._loop.events.wake()
        join_all(self._threads, _GOODBYE_SECONDS)
        join_all(self._loop.receiving, _GOODBYE_SECONDS)

    def __enter__(self) -> "HiddenStateClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                self._loop.events.put(Submitted(request))
            self._loop.events.put(Submitted(None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer's thread
            self._output.put(error)

    # Discovery

    def _run_discovery(self) -> None:
        failing = False
        while not self._stopping.is_set():
            try:
                self._loop.events.put(Found(self._discovery()))
                failing = False
            except Exception as error:  # noqa: BLE001 - targets already known go on
                if not failing:
                    logger.warning("targets could not be looked up: %s", error)
                failing = True
            self._stopping.wait(self._timeouts.discovery)

    # The loop

    def _run_loop(self) -> None:
        try:
            while not self._stopping.is_set():
                woken = self._loop.wait()
                with self._lock:
                    for reply in self._loop.turn(woken, time.monotonic()):
                        self._output.put(reply)
                    if self._window.take_end():
                        self._output.put(_End())
            self._output.put(DflashError("the channel was closed while its stream was read"))
        except BaseException as error:
            if not isinstance(error, DflashError):
                logger.exception("the channel's loop failed")
            self._output.put(error)
        finally:
            with self._lock:
                self._stopping.set()
                self._loop.close()
