"""Errors that a process ends with, and the exit code each one means.

The exit code is the contract between a job and whoever runs it (a shell, the local executor,
the operator): it says whether trying again can help. Library code raises one of these; only the
entry points in `jobs` turn them into exit codes (`jobs/outcome.py`).

Not for: flow control inside the library, or wrapping errors that say enough already.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process's exit code tells its supervisor."""

    DONE = 0
    FAILED = 1
    TEMPORARY = 75  # sysexits' EX_TEMPFAIL: the same command may succeed later
    CONFIGURATION = 78  # sysexits' EX_CONFIG: the same command will fail again
    KILLED = 137  # 128 + SIGKILL, also what the kernel's out-of-memory killer leaves
    PREEMPTED = 143  # 128 + SIGTERM, after a checkpoint was committed


class DflashError(Exception):
    """An error told to a person: one sentence with what was wrong, where, and what to do next."""

    exit_code = ExitCode.FAILED


class ConfigurationError(DflashError):
    """The declaration or its inputs are wrong: retrying the same thing cannot help."""

    exit_code = ExitCode.CONFIGURATION


class TemporaryError(DflashError):
    """Something outside failed (a store, a peer, a full disk): the same command may succeed later."""

    exit_code = ExitCode.TEMPORARY


class Preempted(DflashError):  # noqa: N818 - it is no error of the program
    """The process was asked to stop and has stopped cleanly, with its work committed."""

    exit_code = ExitCode.PREEMPTED
