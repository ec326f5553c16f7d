"""How busy something has been lately: a share over a sliding stretch of time."""

from collections import deque

_STRETCH_SECONDS = 30.0


class BusyShare:
    """Collects busy intervals and tells the share of the last half minute without them."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._intervals: deque[tuple[float, float]] = deque()
        self._busy = 0.0

    def add(self, began: float, ended: float) -> None:
        """One busy interval; they come in order and do not overlap."""
        self._intervals.append((began, ended))
        self._busy += ended - began
        self._forget(ended)

    def idle_share(self, now: float) -> float:
        """0 to 1; 0 before any time has passed."""
        self._forget(now)
        stretch = min(_STRETCH_SECONDS, now - self._began)
        return min(1.0, max(0.0, 1.0 - self._busy / stretch)) if stretch > 0.0 else 0.0

    def _forget(self, now: float) -> None:
        while self._intervals and self._intervals[0][1] <= now - _STRETCH_SECONDS:
            began, ended = self._intervals.popleft()
            self._busy -= ended - began
