"""The training stage's progress object, written every two seconds by a thread of its own.

The trainer replaces the figures when it has new ones; the thread adds the time, so a reader can tell
a slow step from a dead process. A store that fails is said once and never ends training.
"""

import logging
import threading
import time
from collections.abc import Callable

from dflash import layout
from dflash.progress import Progress
from dflash.storage.store import Store

log = logging.getLogger(__name__)

_SECONDS = 2.0


class Heartbeat:
    """Writes `drafters/<run>/heartbeat.json` from `start` to `stop`. Rank 0 only."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._key = store, layout.heartbeat(run)
        self._stop = threading.Event()
        self._failing = False
        self.store_seconds: float | None = None
        """What the last write took: a measure of the store. None before the first."""

    def start(self, current: Callable[[], Progress]) -> None:
        """`current` gives the newest snapshot; it is called from the thread."""
        self._thread = threading.Thread(target=self._run, args=(current,), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write once more, and end; waits a few seconds at most."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self, current: Callable[[], Progress]) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(_SECONDS)
            progress = current().model_copy(update={"updated_at": time.time()})
            began = time.monotonic()
            try:
                self._store.put(self._key, progress.model_dump_json(by_alias=True).encode())
            except Exception as error:  # noqa: BLE001 - a missing heartbeat is seen by who reads it
                if not self._failing:
                    log.warning("the heartbeat cannot be written to %s: %s", self._key, error)
                self._failing = True
            else:
                self._failing = False
                self.store_seconds = time.monotonic() - began
