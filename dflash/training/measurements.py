"""Rank 0's side of measuring while training: asks for checkpoints to be measured, and hears what came of it.

Requests and results are small objects in the run's folder, so that they outlive any process: a later
attempt knows what was measured, and chooses and ends as the first would have. All talk with the store
is in a thread of its own; the training loop never waits for it.
"""

import logging
import threading
import time
from collections.abc import Callable

import orjson

from dflash import layout
from dflash.storage.store import Store
from dflash.training.checkpoints import Place
from dflash.training.measured import Measured

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_OVERDUE_SECONDS = 900.0
"""A request that is not answered so long keeps the next one back no more: target 0 may be another by now."""
_REMEMBERED = 2
"""Requests whose checkpoints are kept for them."""


class Measurements:
    """The measurements of one run. For the training loop's thread; nothing but `wait_for` ever waits."""

    def __init__(self, store: Store, run: str) -> None:
        """Reads what is measured already."""
        self._store, self._run = store, run
        self._known: dict[str, Measured] = {}
        self._fresh: list[Measured] = []
        self._wanted: Place | None = None
        self._open: list[Place] = []
        self._asked_at = time.monotonic()
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._failing = False
        self._look()
        self.take()
        self.asked_step = max((m.step for m in self._known.values()), default=0)
        self._thread = threading.Thread(target=self._work, name="measurements", daemon=True)
        self._thread.start()

    @property
    def history(self) -> list[Measured]:
        """All that is known, in the order of steps."""
        with self._lock:
            return sorted(self._known.values(), key=lambda m: m.place)

    def take(self) -> list[Measured]:
        """What has come since the last call."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            return fresh

    @property
    def waiting(self) -> bool:
        """Whether a request is neither answered nor overdue."""
        with self._lock:
            return bool(self._open) and time.monotonic() - self._asked_at < _OVERDUE_SECONDS

    @property
    def open(self) -> list[Place]:
        """The newest requests that are not answered: their checkpoints must not go."""
        with self._lock:
            return list(self._open)

    @property
    def seconds_since_asked(self) -> float:
        """Since the last request, or since the start."""
        return time.monotonic() - self._asked_at

    def ask(self, place: Place) -> None:
        """Have a committed checkpoint measured next."""
        with self._lock:
            self._wanted = place
            self._open = [*(p for p in self._open if p != place), place][-_REMEMBERED:]
            self.asked_step, self._asked_at = place.step, time.monotonic()
        self._wake.set()

    def wait_for(self, step: int, seconds: float, stopping: Callable[[], bool]) -> bool:
        """Wait until a checkpoint of `step` is measured, so long at most; False when it is not."""
        deadline = time.monotonic() + seconds
        while not any(m.step == step for m in self.history):
            if time.monotonic() > deadline or stopping():
                return False
            time.sleep(0.1)
        return True

    def close(self) -> None:
        """End the thread; waits a few seconds at most."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                with self._lock:
                    wanted, self._wanted = self._wanted, None
                if wanted is not None:
                    document = {"step": wanted.step, "attempt": wanted.attempt}
                    self._store.put(layout.measured(self._run, "wanted.json"), orjson.dumps(document))
                if self.open:
                    self._look()
            except Exception as error:  # noqa: BLE001 - training goes on without measurements, and says so
                if wanted is not None:
                    with self._lock:
                        self._wanted = self._wanted or wanted
                if not self._failing:
                    log.warning("measurements cannot be exchanged with the store: %s", error)
                self._failing = True
            else:
                self._failing = False
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _look(self) -> None:
        for found in self._store.list(layout.measured(self._run, "step-")):
            if found.key in self._known:
                continue
            measured = Measured.model_validate_json(self._store.get(found.key))
            with self._lock:
                self._known[found.key] = measured
                self._fresh.append(measured)
                self._open = [place for place in self._open if place != measured.place]
