"""metrics.jsonl: every row of metrics, one JSON object a line, kept across attempts.

A row is `{"global_step": int, "time": Unix seconds, "attempt": int, <metric>: number, ...}`; an
event has `"event": text` in place of metrics. The copy in the store is the one that an attempt on
another machine goes on from: rows beyond the step it resumes from are dropped, since those steps
are done again, and an event marks the place.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from dflash.storage.store import Store

log = logging.getLogger(__name__)

STEP = "global_step"
_UPLOAD_SECONDS = 30.0
_FINISH_SECONDS = 60.0

Row = dict[str, Any]


def read_rows(data: bytes) -> list[Row]:
    """Rows of a metrics.jsonl. A last line cut short by a crash is left out."""
    rows: list[Row] = []
    for line in data.splitlines():
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return rows


class JsonlMetrics:
    """Appends rows to a local file and copies it to the store now and then, in a thread of its own.

    `rows` after construction are those kept from earlier attempts: all up to `step`.
    """

    def __init__(self, path: Path, *, store: "Store | None", key: str, attempt: int, step: int) -> None:
        self.path = path
        self._store = store
        self._key = key
        self._attempt = attempt
        self._step = step
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = self._earlier(step) if step else []
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in self.rows))
        self._file = path.open("ab")
        self._dirty = threading.Event()
        self._stop = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._upload_until_stopped, name="metrics-upload", daemon=True)
        if store is not None:
            self._thread.start()

    def _earlier(self, step: int) -> list[Row]:
        """Rows of earlier attempts up to `step`: this machine's or the store's, whichever got further."""
        copies = [self.path.read_bytes()] if self.path.exists() else []
        if self._store is not None and self._store.exists(self._key):
            copies.append(self._store.get(self._key))
        kept = [[row for row in read_rows(copy) if row.get(STEP, 0) <= step] for copy in copies]
        return max(kept, key=len, default=[])

    def append(self, step: int, values: Mapping[str, float | str]) -> Row:
        """Write one row at once, so that a crash loses at most the row being written."""
        # A row may be of an earlier step, as what a checkpoint was measured to accept: events do not go back.
        self._step = max(self._step, step)
        # JSON has no NaN or infinity: null keeps the row readable and the hole visible.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        row = {STEP: step, "time": round(time.time(), 3), "attempt": self._attempt, **clean}
        self._file.write(orjson.dumps(row) + b"\n")
        self._file.flush()
        self._dirty.set()
        return row

    def event(self, text: str) -> Row:
        """Note something that happened, at the highest step of any row."""
        return self.append(self._step, {"event": text})

    def finish(self) -> None:
        """Close the file and copy it to the store for the last time, within a minute."""
        self._file.close()
        self._stop.set()
        self._dirty.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_FINISH_SECONDS)
            if self._thread.is_alive():
                log.warning(
                    "metrics were not copied to %s within %.0f s; they are in %s",
                    self._key,
                    _FINISH_SECONDS,
                    self.path,
                )

    def _upload_until_stopped(self) -> None:
        stopped = False
        while not stopped:
            self._dirty.wait()
            self._dirty.clear()
            stopped = self._stop.is_set()
            started = time.monotonic()
            self._upload()
            # A file that has grown large is copied less often: a tenth of the time at most.
            if not stopped:
                self._stop.wait(max(_UPLOAD_SECONDS, 10 * (time.monotonic() - started)))

    def _upload(self) -> None:
        assert self._store is not None
        try:
            self._store.put(self._key, self.path.read_bytes())
        except Exception as error:  # noqa: BLE001 - metrics must never end a run; the next copy has all rows
            if not self._warned:
                self._warned = True
                log.warning(
                    "metrics cannot be copied to %s (%s); they go on in %s", self._key, error, self.path
                )
