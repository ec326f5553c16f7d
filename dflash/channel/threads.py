"""Ending several threads within one deadline.

A thread that returns from a process group's call while the interpreter goes away takes the process down
with it, so both sides wait for theirs.
"""

import threading
import time
from collections.abc import Sequence


def join_all(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Wait for all threads but the current one, for so many seconds together."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
