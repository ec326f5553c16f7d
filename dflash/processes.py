"""Starting a process that never outlives the one that started it, and where it says its last words."""

import os
import sys

TERMINATION_LOG = "DFLASH_TERMINATION_LOG"
"""Variable with the path of a file that a job writes one sentence to when it fails."""

# Run by the child before it becomes the command (the process id stays the same). Not a preexec_fn:
# that would run Python between fork and exec of a process with threads.
_SHIM = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    sys.exit(1)
os.execvp(command[0], command)
"""


def dying_with_parent(command: list[str]) -> list[str]:
    """The command, wrapped so that Linux kills it when the *thread* that starts it ends.

    Start it from a thread that lives as long as it should: the main thread, or one kept for it.
    """
    return [sys.executable, "-S", "-E", "-c", _SHIM, str(os.getpid()), *command]
