"""A work queue of keys: each at most once in it, each worked on by one worker at a time.

A key that is added while it is worked on is worked on again afterwards. Failures are retried after
a doubling, jittered delay. Times are of `time.monotonic`.
"""

import heapq
import random
import threading
import time

_FIRST_RETRY, _LONGEST_RETRY = 1.0, 300.0


class WorkQueue:
    """Keys due now or later."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._active: set[str] = set()
        self._failures: dict[str, int] = {}
        self._condition = threading.Condition()
        self._closed = False

    def add(self, key: str, delay: float = 0.0) -> None:
        """Make a key due after a delay (seconds); an earlier due time that it has is kept."""
        due = time.monotonic() + delay
        with self._condition:
            if key in self._due and self._due[key] <= due:
                return
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._condition.notify()

    def take(self) -> str | None:
        """The next due key, waiting for one; None once closed. Must be followed by `done`."""
        with self._condition:
            while not self._closed:
                entry = self._earliest()
                wait = None if entry is None else entry[0] - time.monotonic()
                if entry is None or (wait is not None and wait > 0):
                    self._condition.wait(wait)
                    continue
                key = entry[1]
                if self._heap[0] == entry:
                    heapq.heappop(self._heap)
                # Else it stays behind a key that is worked on, and is dropped there as superseded.
                del self._due[key]
                self._active.add(key)
                return key
            return None

    def done(self, key: str, failed: bool = False) -> None:
        """End the work on a key that was taken; a failed one comes back after its backoff."""
        with self._condition:
            self._active.discard(key)
            if failed:
                self._failures[key] = self._failures.get(key, 0) + 1
            else:
                self._failures.pop(key, None)
            failures = self._failures.get(key, 0)
            self._condition.notify()
        if failed:
            delay = min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(failures - 1, 16))
            self.add(key, delay * random.uniform(0.5, 1.0))

    def close(self) -> None:
        """Let every waiting and future `take` return None."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def __len__(self) -> int:
        now = time.monotonic()
        with self._condition:
            return sum(due <= now for due in self._due.values())

    def _earliest(self) -> tuple[float, str] | None:
        """The earliest entry of a key that nobody works on, due or not."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # superseded by an earlier one
        if not self._heap or self._heap[0][1] not in self._active:
            return self._heap[0] if self._heap else None
        free = [e for e in self._heap if e[1] not in self._active and self._due.get(e[1]) == e[0]]
        return min(free, default=None)
