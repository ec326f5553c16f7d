"""Processes of one machine as the planner's children: started, watched, ended within a deadline.

Each has a session of its own (Ctrl-C reaches only the executor, which ends them in order), a log file,
a file for its last sentence, and dies with the executor, however that dies.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dflash.processes import TERMINATION_LOG, dying_with_parent
from operators.observed import Child, Role

GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL, so that after ten seconds nothing is left, the storage server included."""


@dataclass
class _Process:
    child: Child
    popen: subprocess.Popen[bytes]
    log: Path
    last_words: Path
    kills: int
    kill_at: float | None = None


class Children:
    """The children of one executor. All methods are for its main thread, which must live on."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called from another thread whenever a child has ended."""
        self._ended = ended
        self._processes: list[_Process] = []

    def start(
        self,
        role: Role,
        output: str,
        index: int,
        *,
        attempt: int,
        world: int,
        command: list[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> Child:
        """Start one process; its stdout and stderr are appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        last_words = log.with_suffix(".last")
        last_words.unlink(missing_ok=True)
        with log.open("ab") as sink:
            popen = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**environment, TERMINATION_LOG: str(last_words)},
                start_new_session=True,
            )
        now = time.time()
        child = Child(
            id=f"{popen.pid}-{now:.3f}",
            role=role,
            hash=output,
            index=index,
            state="running",
            attempt=attempt,
            world=world,
            created_at=now,
        )
        self._processes.append(_Process(child, popen, log, last_words, _out_of_memory_kills()))
        threading.Thread(target=self._watch, args=(popen,), name=f"watch-{popen.pid}", daemon=True).start()
        return child

    def look(self) -> tuple[Child, ...]:
        """All children, ended ones too; ends what has outlived its grace."""
        for process in self._processes:
            if not process.child.live:
                continue
            code = process.popen.poll()
            if code is not None:
                process.child = _outcome(process, code)
                _signal_group(process.popen.pid, signal.SIGKILL)  # what it left behind
            elif process.kill_at is not None and time.time() >= process.kill_at:
                _signal_group(process.popen.pid, signal.SIGKILL)
        return tuple(p.child for p in self._processes)

    def stop(self, which: Callable[[Child], bool]) -> None:
        """Ask children to end; those that have not after the grace are killed at a later look."""
        for process in self._processes:
            if process.child.live and process.kill_at is None and which(process.child):
                process.kill_at = time.time() + GRACE_SECONDS
                process.child = replace(process.child, state="stopping")
                process.popen.send_signal(signal.SIGTERM)

    def stop_all(self, hurry: Callable[[], bool]) -> None:
        """End all children within the grace; at once when `hurry` says so. Blocks until they are gone."""
        self.stop(lambda _: True)
        while any(c.live for c in self.look()):
            if hurry():
                for process in self._processes:
                    process.kill_at = 0.0
            time.sleep(0.05)

    @property
    def next_kill(self) -> float | None:
        """When the next child's grace ends."""
        return min(
            (p.kill_at for p in self._processes if p.child.live and p.kill_at is not None), default=None
        )

    def log_of(self, child: Child) -> Path:
        """Where a child writes."""
        return next(p.log for p in self._processes if p.child.id == child.id)

    def _watch(self, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        self._ended()


def _outcome(process: _Process, code: int) -> Child:
    exit_code = 128 - code if code < 0 else code  # a signal's number is negative here
    message = ""
    if exit_code != 0:
        said = process.last_words.read_text(errors="replace").strip() if process.last_words.exists() else ""
        message = f"{said or _last_line(process.log)} (log: {process.log})"
    killed_for_memory = code == -signal.SIGKILL and _out_of_memory_kills() > process.kills
    return replace(
        process.child,
        state="succeeded" if exit_code == 0 else "failed",
        exit_code=exit_code,
        ended_at=time.time(),
        message=message,
        reason="OOMKilled" if killed_for_memory else "",
    )


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _signal_group(group: int, how: signal.Signals) -> None:
    try:
        os.killpg(group, how)
    except (ProcessLookupError, PermissionError):
        return  # gone; or its number belongs to somebody else by now


def _out_of_memory_kills() -> int:
    """How often Linux has killed for want of memory since it started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
