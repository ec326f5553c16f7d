"""Which requests go into a target's next batch. Pure: also what a simulation of many targets runs."""

from collections import deque
from collections.abc import Mapping
from typing import Protocol, TypeVar


class Queued(Protocol):
    """A request in a link's queue."""

    @property
    def arrival(self) -> int:
        """Rises with each request, over all links."""

    @property
    def tokens(self) -> int:
        """Its length."""


Link = TypeVar("Link")
Request = TypeVar("Request", bound=Queued)


def pick(queues: Mapping[Link, deque[Request]], budget: int) -> list[tuple[Link, Request]]:
    """Take requests off the queues, oldest first over all links, up to `budget` tokens.

    At least one is taken where there is one: a sample longer than the budget goes alone. Oldest first
    means that no link can be starved, whatever the others ask for.
    """
    waiting = {link: queue for link, queue in queues.items() if queue}
    picked: list[tuple[Link, Request]] = []
    tokens = 0
    while waiting:
        link = min(waiting, key=lambda k: waiting[k][0].arrival)
        queue = waiting[link]
        if picked and tokens + queue[0].tokens > budget:
            break
        tokens += queue[0].tokens
        picked.append((link, queue.popleft()))
        if not queue:
            del waiting[link]
    return picked
