"""A drafter's window of samples: what is asked for, what came, what failed, and what is next in order.

The scheduler's decisions with the requests and replies themselves, and the counts. Knows links by name and
nothing of sockets or time but what it is told. Not thread-safe: the loop owns it.
"""

import logging
from collections import Counter
from collections.abc import Iterator

from dflash.channel import messages
from dflash.channel.interface import Reply, Request
from dflash.channel.scheduler import Scheduler
from dflash.errors import DflashError
from dflash.model.states import States

logger = logging.getLogger(__name__)

_LOST_IN_A_ROW = 16
"""Samples that no target could give, with none delivered between them: then nothing works any more."""


class Window:
    """Requests from their submission until they are handed over."""

    def __init__(self, deadline: float, max_refusals: int) -> None:
        self.scheduler = Scheduler(deadline, max_refusals)
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self._requests: dict[int, Request] = {}
        self._replies: dict[int, Reply] = {}
        self._all_submitted = False
        self._lost_in_a_row = 0

    @property
    def ready(self) -> int:
        """Samples that are here and wait for one that is ahead of them."""
        return len(self._replies)

    @property
    def wanting(self) -> bool:
        """Whether a sample is missing that a target could give."""
        return self.scheduler.unfinished > self.scheduler.ready

    def submit(self, request: Request | None) -> None:
        """Add a request; None: there are no more."""
        if request is None:
            self._all_submitted = True
            return
        self.counts["submitted"] += 1
        self._requests[self.scheduler.submit(len(request.ids))] = request

    def asks(self, now: float) -> Iterator[tuple[str, messages.Ask, bytes]]:
        """What is to be asked for now: link, message and its second frame."""
        asked: dict[str, list[int]] = {}
        for link, index in self.scheduler.assign(now):
            asked.setdefault(link, []).append(index)
            self.counts["requested" if self.scheduler.issued(index) == 1 else "reissued"] += 1
        for link, indexes in asked.items():
            for start in range(0, len(indexes), messages.MAX_SAMPLES):
                part = indexes[start : start + messages.MAX_SAMPLES]
                samples = [(index, self._requests[index]) for index in part]
                items = [messages.Item(index=i, sample_id=r.sample_id, length=len(r.ids)) for i, r in samples]
                payload = messages.encode_ids([request.ids for _, request in samples])
                yield link, messages.Ask(items=items), payload

    def arrived(self, link: str, index: int, states: States, now: float) -> bool:
        """Good states. False if they are not wanted any more."""
        if not self.scheduler.deliver(link, index, now):
            return False
        self._lost_in_a_row = 0
        self._replies[index] = Reply(self._requests[index], states)
        return True

    def refused(self, link: str, target: str, index: int, text: str, now: float) -> None:
        """A sample was not to be had by a link. DflashError when none can be had any more."""
        request = self._requests[index]
        logger.warning("%s: sample %r: %s", target, request.sample_id, text)
        self.causes[text] += 1
        if self.scheduler.refuse(link, index, now):
            self.scheduler.give_up(index)
            fault = (
                f"sample {request.sample_id!r} was refused {self.scheduler.refusals(index)} times, last by "
                f"{target}: {text}; look at the target's log, and at the sample's row"
            )
            self._replies[index] = Reply(request, None, fault)
            self._lost_in_a_row += 1
            if self._lost_in_a_row >= _LOST_IN_A_ROW:
                raise DflashError(f"{self._lost_in_a_row} samples in a row could not be had: {fault}")

    def take(self) -> list[Reply]:
        """Replies that are next in order; each is returned once."""
        taken = self.scheduler.take()
        for index in taken:
            del self._requests[index]
        return [self._replies.pop(index) for index in taken]

    def take_end(self) -> bool:
        """Whether all that was submitted has been taken and no more comes; True once a stream."""
        over = self._all_submitted and self.scheduler.unfinished == 0
        if over:
            self._all_submitted = False
        return over
