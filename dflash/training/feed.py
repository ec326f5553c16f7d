"""From the order of samples to samples with their hidden states, in a thread of its own.

The thread asks the channel for what this rank trains, in order, and turns replies into samples while
the trainer computes. An error there (the channel's, the store's) reaches the trainer at its next
sample. The trainer can always be interrupted while it waits; the time it waits is counted.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dflash.channel.interface import Reply, Request
from dflash.objective.batch import Sample
from dflash.training.order import Order
from dflash.training.samples import TrainingSample, TrainingSet

_AHEAD = 2
"""Samples held here beside the channel's window, so that neither side waits for the other's hand."""
_POLL_SECONDS = 0.1

Stream = Callable[[Iterator[Request]], Iterator[Reply]]


class Interrupted(Exception):  # noqa: N818 - not an error: the group is asked to stop
    """The wait for a sample was given up because a stop was asked for."""


@dataclass(frozen=True)
class Fed:
    """A sample to train on; None when no target could give its states, and `fault` says why."""

    sample: Sample | None
    fault: str = ""


class Feed:
    """The samples that one rank trains from `first_step` on, in order."""

    def __init__(
        self,
        stream: Stream,
        training_set: TrainingSet,
        order: Order,
        *,
        rank: int,
        world: int,
        first_step: int,
    ) -> None:
        self._stream, self._training_set, self._order = stream, training_set, order
        self._rank, self._world, self._first_step = rank, world, first_step
        self._asked: deque[TrainingSample] = deque()
        self._samples: queue.Queue[Fed | BaseException] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self.wait_seconds = 0.0
        """Time in which `take` has waited so far."""
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def take(self, interrupted: Callable[[], bool]) -> Fed:
        """The next sample. Raises Interrupted once `interrupted()`, or what ended the channel."""
        started = time.monotonic()
        try:
            while True:
                if interrupted():
                    raise Interrupted
                try:
                    got = self._samples.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(got, BaseException):
                    raise got
                return got
        finally:
            self.wait_seconds += time.monotonic() - started

    def close(self) -> None:
        """Let the thread end; samples not taken are dropped."""
        self._closed.set()

    def _run(self) -> None:
        try:
            for reply in self._stream(self._requests()):
                sample = self._asked.popleft()
                if reply.states is None:
                    self._put(Fed(None, reply.fault))
                else:
                    ids = torch.from_numpy(sample.ids.astype("int64"))
                    supervised = torch.from_numpy(sample.supervised)
                    self._put(Fed(Sample(sample.sample_id, ids, supervised, reply.states)))
                if self._closed.is_set():
                    return
            self._put(RuntimeError("the channel ended before the run did"))
        except BaseException as error:  # noqa: BLE001 - handed to the trainer, which raises it
            self._put(error)

    def _requests(self) -> Iterator[Request]:
        """What to ask for, in order; reading rows happens here, ahead of training."""
        index = 0
        for _, places in self._order.from_step(self._first_step, self._rank, self._world):
            for place in places:
                if self._closed.is_set():
                    return
                sample = self._training_set[place.sample]
                self._asked.append(sample)
                yield Request(index, sample.sample_id, sample.ids)
                index += 1

    def _put(self, item: Fed | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._samples.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return
