"""Real processes that start at once: forked from a server that has imported torch and the library.

A started interpreter needs seconds to import torch; a fork of one that has done so needs none. The
children are processes of their own in every other way: killed, stopped and waited for like any.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preload"])


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start_function(body: Callable[..., Any], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Run `body(pipe, *arguments)` in a process; the other end of its pipe is given back."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


SLOW_CAPTURE = "TEST_CAPTURE_SECONDS"
"""Seconds that a target takes longer for each batch, so that there is time to disturb a tiny run."""


TRACE = "TEST_TRACE"
"""A file to which drafters append, as lines of JSON, what they ask targets for and what they train."""


class JobProcess:
    """`python -m jobs.<name>` in all but its start-up time."""

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """`environment` is added to the process's own; what it says goes to `log`."""
        self.name = name
        self.log = log
        self._process = CONTEXT.Process(
            target=_run_job, args=(name, list(arguments), dict(environment), str(log)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code (minus the signal that killed it); an AssertionError with its log when it runs on."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise AssertionError(f"{self.name} still runs after {seconds:.0f} s:\n{self.said()[-6000:]}")
        return self._process.exitcode

    def said(self) -> str:
        """What it wrote to its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Wait until its log has `text`; AssertionError with the log if it does not come or ends first."""
        deadline = time.monotonic() + seconds
        while text not in self.said():
            if time.monotonic() > deadline or not self.running:
                raise AssertionError(f"{self.name} did not say {text!r}:\n{self.said()[-6000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, whatever state it is in."""
        if self.running:
            self._process.kill()
        self._process.join(10.0)


def _run_job(name: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    sys.argv = [f"jobs.{name}", *arguments]
    import torch

    torch.set_num_threads(1)
    if SLOW_CAPTURE in environment:
        _slow_capture_down(float(environment[SLOW_CAPTURE]))
    if TRACE in environment and name == "drafter":
        _trace(environment[TRACE], next(a for a in arguments if a.startswith("--attempt=")).split("=")[1])
    module = __import__(f"jobs.{name}", fromlist=["main"])
    module.main()


def _slow_capture_down(seconds: float) -> None:
    from dflash.model.target import TargetModel

    capture = TargetModel.capture

    def slow(self: TargetModel, *arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return capture(self, *arguments, **named)

    TargetModel.capture = slow  # type: ignore[method-assign]


def _trace(path: str, attempt: str) -> None:
    from dflash.channel.window import Window
    from dflash.training.trainer import Trainer

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    train, asks = Trainer._train, Window.asks

    def say(**what: Any) -> None:
        os.write(file, json.dumps(what).encode() + b"\n")  # at once: a kill leaves whole lines

    def traced_train(self: Trainer, samples: list[Any], epoch: int) -> None:
        train(self, samples, epoch)
        trained = [sample.sample_id for sample in samples]
        say(attempt=int(attempt), step=self.step, epoch=epoch, trained=trained)

    def traced_asks(self: Window, now: float) -> Any:
        for link, ask, payload in asks(self, now):
            again = sum(self.scheduler.issued(item.index) > 1 for item in ask.items)
            say(requested=len(ask.items) - again, reissued=again)
            yield link, ask, payload

    Trainer._train, Window.asks = traced_train, traced_asks  # type: ignore[method-assign]
