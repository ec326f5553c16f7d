"""How many requests should be in flight: enough that the server's queue is never empty, but shallow.

Grows while the server has nothing waiting, shrinks when it has much waiting at two looks in a row or says
that it is overloaded. One look says little: answers of one length end together, and what follows them waits
for a moment. Pure: it is told what was seen and does no input or output.
"""

_GROWTH = 1.25
_SHRINK = 0.8
_OVERLOAD = 0.7
_DEEP = 0.25
"""Share of the requests in flight that may wait in the server's queue."""


class Pace:
    """The number in flight, between 1 and `most`."""

    def __init__(self, first: int, most: int) -> None:
        self.most = most
        self._now = float(min(first, most))
        self._was_deep = False
        self._quiet_until = 0.0

    @property
    def now(self) -> int:
        """How many to have in flight."""
        return max(1, int(self._now))

    def queue_seen(self, waiting: int, in_flight: int) -> None:
        """The servers' queues hold `waiting` of our `in_flight` requests."""
        deep = waiting > _DEEP * in_flight
        if deep and self._was_deep:
            self._now = max(1.0, self._now * _SHRINK)
        self._was_deep = deep
        if waiting == 0 and in_flight >= self.now:
            self._now = min(float(self.most), self._now * _GROWTH + 1)

    def overloaded(self, now: float) -> None:
        """A request was turned away at time `now` in seconds. Many at once count as one."""
        if now >= self._quiet_until:
            self._now = max(1.0, self._now * _OVERLOAD)
            self._quiet_until = now + 1.0
