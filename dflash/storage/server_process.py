"""A server as a child process that never outlives this one, however this one ends.

Not for jobs, which must be asked to stop and given time.
"""

import signal
import subprocess
import threading
from pathlib import Path

from dflash.errors import TemporaryError
from dflash.processes import dying_with_parent

_STOP_SECONDS = 1.0  # it saves nothing when asked to stop (a kill loses nothing either), and takes 15 s


class ServerProcess:
    """A running server; `lock` is a descriptor that it inherits and so keeps locked."""

    def __init__(self, command: list[str], log_file: Path, lock: int) -> None:
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        started = threading.Event()

        def keep() -> None:
            # Linux kills the child when the *thread* that made it ends, so one thread is kept for it.
            try:
                with log_file.open("wb") as output:
                    self._process = subprocess.Popen(
                        dying_with_parent(command),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        cwd=log_file.parent,
                        start_new_session=True,  # Ctrl-C stops the jobs first, then this
                        pass_fds=(lock,),  # the folder stays locked while either of us lives
                    )
            except OSError as error:
                self._failure = error
                return
            finally:
                started.set()
            self._process.wait()

        threading.Thread(target=keep, name="embedded-store", daemon=True).start()
        started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it, by force if it does not go within a second."""
        assert self._process is not None
        for how, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, 10.0)):
            if self.running:
                self._process.send_signal(how)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            return
        raise TemporaryError(
            f"the embedded S3 server, process {self.pid}, cannot be stopped; stop it by hand"
        )

    def last_line(self) -> str:
        """The last thing it logged."""
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
