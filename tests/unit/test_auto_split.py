"""`targets: auto` on a simulated fleet: it comes to rest within three moves, and never turns back."""

import random
from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.training.auto_targets import AutoTargets
from operators.plan import desired_targets

INTERVAL = 10.0
MOST = 8


class Fleet:
    """Targets that take a while to come, drafters that need `needed` of them, and what each side measures.

    `noise` is the standard error of a share; `stall` is the share that both sides wait whatever they do.
    """

    def __init__(self, needed: float, start: int, noise: float, stall: float, seed: int) -> None:
        self.needed, self.noise, self.stall = needed, noise, stall
        self.live, self.wanted = start, start
        self.moves: list[int] = []
        self._coming: deque[float] = deque()
        self._idle: deque[float] = deque(maxlen=int(30 / INTERVAL))
        self._random = random.Random(seed)
        self._auto = AutoTargets(1, MOST)
        self._now = 0.0

    def interval(self, starting_seconds: float) -> None:
        """Ten seconds: work, measure, report; the operator looks, and a target may come or go."""
        self._now += INTERVAL
        while self._coming and self._coming[0] <= self._now:
            self._coming.popleft()
            self.live += 1
        rate = min(1.0, self.live / self.needed)
        self._idle.append(self._share(1.0 - rate * self.needed / self.live))
        idle = sum(self._idle) / len(self._idle)
        self._auto.see(self._now, self.live, idle, self._share(1.0 - rate))
        training = SimpleNamespace(targets="auto", min_targets=1, max_targets=MOST)
        children = [SimpleNamespace(role="target", hash="h", live=True, index=i) for i in range(self.live)]
        seen: Any = SimpleNamespace(
            spec=SimpleNamespace(training=training),
            hashes=SimpleNamespace(drafter="h"),
            children=children,
            suggested_targets=self._auto.wanted,
        )
        wanted = desired_targets(seen) if self._auto.wanted is not None else self.wanted
        if wanted != self.wanted:
            self.moves.append(wanted)
            for _ in range(wanted - self.wanted):
                self._coming.append(self._now + starting_seconds)
            self.live = min(self.live, wanted)
            self.wanted = wanted

    def _share(self, true: float) -> float:
        measured = self.stall + (1.0 - self.stall) * true + self._random.gauss(0.0, self.noise)
        return min(1.0, max(0.0, measured))


@settings(deadline=None, max_examples=300)
@given(
    needed=st.floats(0.2, 12.0),
    start=st.integers(1, MOST),
    noise=st.floats(0.0, 0.01),
    stall=st.floats(0.0, 0.05),
    starting=st.floats(5.0, 300.0),
    seed=st.integers(0, 2**32),
)
def test_it_comes_to_rest_within_three_moves_and_never_turns_back(
    needed, start, noise, stall, starting, seed
):
    fleet = Fleet(needed, start, noise, stall, seed)
    for _ in range(400):
        fleet.interval(starting)
    moves = [start, *fleet.moves]
    assert len(fleet.moves) <= 3, moves
    steps = [b - a for a, b in pairwise(moves)]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps), f"turned back: {moves}"
    enough = min(needed, MOST)
    assert fleet.live >= 0.85 * enough, "drafters still wait"
    assert fleet.live == 1 or fleet.live <= 1.15 * enough / 0.9 + 1.5, "targets still idle"


def test_a_target_that_has_just_come_is_not_judged_by_the_time_before_it() -> None:
    auto = AutoTargets(1, MOST)
    for second in (0, 20, 40):
        auto.see(second, 1, 0.0, 0.5)
    assert auto.wanted is None
    auto.see(60, 1, 0.0, 0.5)
    assert auto.wanted == 2
    auto.see(120, 2, 0.0, 0.5)  # it came a moment ago: the drafters waited before
    assert auto.wanted == 2
    auto.see(180, 2, 0.02, 0.0)
    assert auto.wanted == 2


@pytest.mark.parametrize("needed", [0.5, 1.0, 3.3, 8.0])
def test_a_fleet_that_fits_is_left_alone(needed: float) -> None:
    fleet = Fleet(needed, max(1, round(needed)), 0.01, 0.03, 1)
    for _ in range(200):
        fleet.interval(60.0)
    assert fleet.moves == [] or fleet.moves[-1] - max(1, round(needed)) in (0, 1)
