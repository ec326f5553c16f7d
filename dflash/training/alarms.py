"""Watches a run's own metrics: which alerts hold, and which of them are new.

Keeps what `dflash.planning.alerts` looks at, thinned to a bounded number of rows, and how long an alert has
been away, so that one that comes and goes is said once and not every interval.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.planning.alerts import Alert, Surroundings, alerts

_RECENT = 60
"""Newest rows kept one by one."""
_SPACING, _REACH = 0.005, 0.30
"""Shares of the run: between two rows that are kept for trends, and how far those reach back."""
_CLEAR = 12
"""Rows without an alert before it is over, and may be said again."""

Row = Mapping[str, Any]


class Alarms:
    """The alerts of one attempt."""

    def __init__(self, earlier: Sequence[Row] = ()) -> None:
        """`earlier` are the rows of the attempts before."""
        self._recent: deque[Row] = deque(maxlen=_RECENT)
        self._trend: deque[Row] = deque()
        self._held: dict[str, Alert] = {}
        self._away: dict[str, int] = {}
        for row in earlier:
            if "event" not in row:
                self._keep(row)

    @property
    def sentences(self) -> list[str]:
        """What is wrong now, oldest first."""
        return [alert.sentence for alert in self._held.values()]

    def see(self, row: Row, around: Surroundings, others: Sequence[Alert] = ()) -> list[Alert]:
        """Take in a new row of metrics; gives the alerts that are new. `others` hold for other reasons."""
        self._keep(row)
        found = {
            alert.name: alert for alert in (*others, *alerts(list(self._trend), around, list(self._recent)))
        }
        new = [alert for name, alert in found.items() if name not in self._held]
        for name in list(self._held):
            self._away[name] = 0 if name in found else self._away.get(name, 0) + 1
            if self._away[name] >= _CLEAR:
                del self._held[name], self._away[name]
        self._held |= found
        return new

    def _keep(self, row: Row) -> None:
        share = row.get("progress/share")
        if share is None:
            return
        self._recent.append(row)
        if not self._trend or share - self._trend[-1]["progress/share"] >= _SPACING:
            self._trend.append(row)
        while share - self._trend[0]["progress/share"] > _REACH:
            self._trend.popleft()
