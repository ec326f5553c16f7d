"""How much of the last half minute something took: a share over a sliding stretch of time."""

from collections import deque

_STRETCH_SECONDS = 30.0


class RecentShare:
    """Collects intervals, which come in order and do not overlap."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._intervals: deque[tuple[float, float]] = deque()
        self._covered = 0.0

    def add(self, began: float, ended: float) -> None:
        """One interval that has just ended."""
        self._intervals.append((began, ended))
        self._covered += ended - began
        self._forget(ended)

    def share(self, now: float) -> float:
        """Share of the stretch that the intervals cover, 0 to 1."""
        self._forget(now)
        stretch = min(_STRETCH_SECONDS, now - self._began)
        return min(1.0, max(0.0, self._covered / stretch)) if stretch > 0.0 else 0.0

    def _forget(self, now: float) -> None:
        while self._intervals and self._intervals[0][1] <= now - _STRETCH_SECONDS:
            began, ended = self._intervals.popleft()
            self._covered -= ended - began
