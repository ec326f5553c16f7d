"""What `training.targets: auto` is told by a run: how many targets it wants, once a change has settled.

A target that has just come or gone is in the count before it is in the shares of waiting, which look back
half a minute; judged too soon, one change would call for the next. And what was asked for stands until it
is there: near a whole number, noise would ask for one more and one less in turn. Not for what is done about
it, which is the planner's (`operators.plan`).
"""

from dflash.channel.verdict import wanted_targets

_SETTLE_SECONDS = 45.0
"""The half minute that a target's idle share looks back on, and an interval of metrics."""
_STAND_SECONDS = 900.0
"""What was asked for and has not come by then, as on a full cluster, is judged anew."""


class AutoTargets:
    """The number wanted, as of the last look; None until the first fleet has settled."""

    def __init__(self, least: int, most: int) -> None:
        self.wanted: int | None = None
        self._least, self._most = least, most
        self._live = -1
        self._changed_at = self._asked_at = 0.0

    def see(self, now: float, live: int, idle: float | None, wait: float | None) -> None:
        """Take in one interval: targets alive at its end, and the shares of time that each side waited."""
        if live != self._live:
            self._live, self._changed_at = live, now
            return
        pending = self.wanted not in (None, live) and now - self._asked_at < _STAND_SECONDS
        if pending or now - self._changed_at < _SETTLE_SECONDS:
            return
        wanted = max(self._least, min(wanted_targets(live, idle, wait), self._most))
        if wanted != self.wanted:
            self.wanted, self._asked_at = wanted, now
