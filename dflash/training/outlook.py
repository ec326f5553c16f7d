"""Rank 0's view of what the run costs and of what a warm-up foretold, for metrics and the schedule's alert.

Reads small objects of the store in a thread of its own: what the executor has counted, again and again, and
the warm-up's rates, once. A store that is away leaves the figures as they were; training never waits.
"""

import logging
import threading
import time

from dflash.planning.kept import find_warm_up, read_spending
from dflash.planning.spending import Spending, project
from dflash.planning.warm_up import WarmUp, settings_of
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.storage.store import Store

log = logging.getLogger(__name__)

_LOOK_SECONDS = 15.0


class Outlook:
    """Figures on money and time. For the training loop's thread; nothing here waits."""

    def __init__(self, store: Store, drafter: Drafter) -> None:
        """Starts the thread; the first figures come a moment later."""
        self._store, self._name = store, drafter.metadata.name
        self._price = drafter.spec.tracking.gpu_hour_price
        self._settings = settings_of(drafter.spec)
        self._spending = Spending()
        self._warm_up: WarmUp | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="outlook", daemon=True)
        self._thread.start()

    @property
    def steps_per_second(self) -> float | None:
        """What a warm-up with these settings and this fleet reached; None where there was none."""
        known = self._warm_up
        return known.steps_per_second if known is not None and known.settings == self._settings else None

    def metrics(self, progress: Progress) -> dict[str, float]:
        """`cost/...` for a row of metrics; empty before anything was counted."""
        if not self._spending.gpu_seconds:
            return {}
        seen = project(
            self._spending, "training", progress, now=time.time(), price=self._price, warm_up=self._warm_up
        )
        told = {
            "cost/spent_gpu_hours": seen.spent_gpu_hours,
            "cost/wasted_gpu_hours": seen.wasted_gpu_hours,
            "cost/projected_gpu_hours": seen.gpu_hours,
            "cost/spent": seen.spent,
            "cost/wasted": seen.wasted,
            "cost/projected": seen.cost,
            "cost/hours_left": None if seen.ends_at is None else (seen.ends_at - time.time()) / 3600,
        }
        return {name: value for name, value in told.items() if value is not None}

    def close(self) -> None:
        """End the thread; waits a few seconds at most."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        failing = False
        warm_up_read = False
        while not self._stop.is_set():
            try:
                if not warm_up_read:
                    self._warm_up = find_warm_up(self._store, self._name)
                    warm_up_read = True
                self._spending = read_spending(self._store, self._name)
            except Exception as error:  # noqa: BLE001 - figures on money must never end a run
                if not failing:
                    log.warning("what the run costs cannot be read: %s", error)
                failing = True
            else:
                failing = False
            self._stop.wait(_LOOK_SECONDS)
