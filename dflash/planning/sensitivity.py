"""Which assumption moves an estimate most: each is taken to both ends of its range, all else equal. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflash.planning.assumptions import Assumptions

_STEP = 1.05


@dataclass(frozen=True)
class Mover:
    """The assumption that moves an estimate most.

    low, high: the estimate at the ends of the assumption's range, in that order. elasticity: percent by
    which the estimate changes for one percent of the assumption, at its value.
    """

    assumption: str
    value: float
    elasticity: float
    low: float
    high: float

    @property
    def swing(self) -> float:
        """The larger end over the smaller one; 1 when the assumption does not matter."""
        ends = sorted((self.low, self.high))
        return math.inf if ends[0] <= 0 else ends[1] / ends[0]


def movers(
    estimate: Callable[[Assumptions], Mapping[str, float]], assumed: Assumptions
) -> dict[str, Mover | None]:
    """For each of the estimates its mover, None when no assumption moves it.

    `estimate` gives all figures, which are positive, from assumptions.
    """
    base = estimate(assumed)
    found: dict[str, Mover | None] = dict.fromkeys(base)
    for entry in assumed.entries.values():
        if entry.known:
            continue
        low, high, near = (
            estimate(assumed.varied(entry.name, value))
            for value in (entry.low, entry.high, entry.value * _STEP)
        )
        for name, value in base.items():
            if low[name] == high[name] or value <= 0:
                continue
            elasticity = math.log(near[name] / value) / math.log(_STEP) if near[name] > 0 else 0.0
            mover = Mover(entry.name, entry.value, round(elasticity, 3), low[name], high[name])
            best = found[name]
            if best is None or mover.swing > best.swing:
                found[name] = mover
    return found
