"""From exceptions to exit codes: the last thing between a job and its supervisor.

A job's `main` is wrapped by `exit_with_outcome`. What it says goes to stderr and, in one sentence,
to the termination log (on a cluster /dev/termination-log, which the kubelet copies into the pod's
status), from where executors copy it into `lastFailure`.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dflash.errors import DflashError, ExitCode
from dflash.processes import TERMINATION_LOG

_LIMIT = 4000  # the kubelet keeps 4096 bytes

log = logging.getLogger("dflash")


def exit_with_outcome(run: Callable[[], None]) -> None:
    """Run a job's body and leave the process with the exit code that says how it ended."""
    try:
        run()
    except DflashError as error:
        code, sentence = error.exit_code, str(error)
        log.error("%s", sentence)
    except KeyboardInterrupt:
        code, sentence = ExitCode(128 + signal.SIGTERM), "interrupted"
    except OSError as error:
        if error.errno == 28:  # ENOSPC
            code, sentence = ExitCode.TEMPORARY, f"disk full: {error}; free some space and run again"
        else:
            code, sentence = ExitCode.FAILED, f"{type(error).__name__}: {error}"
        log.exception("%s", sentence)
    except Exception as error:
        code, sentence = ExitCode.FAILED, f"{type(error).__name__}: {error}"
        log.exception("%s", sentence)
    else:
        code, sentence = ExitCode.DONE, ""
    if sentence:
        _write_termination_log(sentence)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of torch and ZeroMQ must not turn a finished job into a hang or a crash.
    os._exit(int(code))


def _write_termination_log(sentence: str) -> None:
    path = os.environ.get(TERMINATION_LOG)
    if path:
        try:
            Path(path).write_text(sentence[:_LIMIT])
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
