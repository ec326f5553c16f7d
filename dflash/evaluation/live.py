"""The stage's progress object: how many answers are there, how fast they come, what they say so far."""

import logging
import time
from collections import deque
from collections.abc import Callable

from dflash import layout
from dflash.progress import Progress
from dflash.storage.store import Store

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 2.0
_RATE_WINDOW = 50


class StageProgress:
    """The stage's progress object, written every two seconds at most."""

    def __init__(self, store: Store, evaluation: str) -> None:
        self._store = store
        self._key = layout.evaluation(evaluation, "progress.json")
        self._written = 0.0
        self._message = ""
        self.done = 0
        self.total = 0
        self.figures: Callable[[], dict[str, float | str]] = dict
        self._times: deque[float] = deque(maxlen=_RATE_WINDOW)

    def say(self, message: str) -> None:
        """What is being done now."""
        self._message = message
        log.info("%s", message)
        self._write()

    def count(self, done: int) -> None:
        """So many answers are there."""
        self.done = done
        self._times.append(time.monotonic())
        if time.monotonic() - self._written >= _PROGRESS_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        times = self._times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
        progress = Progress(
            stage="evaluation",
            message=self._message,
            done=self.done,
            total=self.total,
            unit="answers",
            rate=rate,
            eta_seconds=(self.total - self.done) / rate if rate else None,
            updated_at=time.time(),
            figures=self.figures(),
        )
        self._store.put_json(self._key, progress.model_dump(mode="json", by_alias=True))
