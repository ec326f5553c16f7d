"""How a process that works in a thread is told to stop, and how it tells that it cannot go on.

Python hears signals in the main thread only, and not while that thread is inside a collective or a
load. So a job's work runs in a thread of its own, and the main thread does nothing but listen: to
signals, to the work's end, and to what makes going on pointless.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable

from dflash.errors import DflashError, Preempted

log = logging.getLogger(__name__)

GRACE_SECONDS = 8.5
"""From the request to stop to the process's end, unless it is busy committing its work."""


class Control:
    """Shared by the main thread and the work."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set once the process was asked to end."""
        self._committing = threading.Event()
        self._wake = threading.Event()
        self._fatal: DflashError | None = None

    def commit_begins(self) -> None:
        """From here to the end of the work, a request to stop waits: what is done is being committed."""
        self._committing.set()

    def commit_ends(self) -> None:
        """What was done is committed: what is left, as sending metrics, may be cut short."""
        self._committing.clear()

    def give_up(self, error: DflashError) -> None:
        """End the process with this error, whatever its work is stuck in. From any thread."""
        self._fatal = error
        self._wake.set()

    def ask_to_stop(self) -> None:
        """As a signal does."""
        self.stopping.set()
        self._wake.set()

    def run(self, work: Callable[[], None]) -> None:
        """Do the work in a thread, and end as it ends. In the main thread only.

        On SIGTERM or SIGINT the work is asked to stop and has `GRACE_SECONDS` for it; work that does
        not heed it by then had nothing to commit, and is left behind with Preempted.
        """
        ended: list[BaseException | None] = []

        def body() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                ended.append(error)
            else:
                ended.append(None)
            self._wake.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.ask_to_stop())
        thread = threading.Thread(target=body, name="work", daemon=True)
        thread.start()
        asked_at: float | None = None
        while not ended and self._fatal is None:
            if not self.stopping.is_set():
                # A plain wait without a time would not let signal handlers run on every platform.
                self._wake.wait(1.0)
                continue
            if asked_at is None:
                asked_at = time.monotonic()
                log.info("asked to stop")
                self._wake.clear()
            self._wake.wait(0.2)
            late = time.monotonic() - asked_at > GRACE_SECONDS
            if late and not self._committing.is_set() and not ended and self._fatal is None:
                raise Preempted("stopped in time; the next attempt goes on from what is committed")
        if ended and ended[0] is not None:
            raise ended[0]
        if not ended and self._fatal is not None:
            raise self._fatal
