"""How a job that works in a thread ends: by itself, when asked to, or when going on is pointless."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from dflash.errors import ConfigurationError, Preempted, TemporaryError
from dflash.training import control as control_module
from dflash.training import run as run_module
from dflash.training.control import Control


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def soon(action: object, *arguments: object) -> None:
    threading.Timer(0.2, action, arguments).start()  # type: ignore[arg-type]


def test_work_that_ends_ends_the_process() -> None:
    done: list[int] = []
    Control().run(lambda: done.append(1))
    assert done == [1]


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise ConfigurationError("wrong")

    with pytest.raises(ConfigurationError, match="wrong"):
        Control().run(work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_work_to_stop_and_its_outcome_counts(number: signal.Signals) -> None:
    control = Control()

    def work() -> None:
        assert control.stopping.wait(10)
        raise Preempted("with a checkpoint")

    soon(os.kill, os.getpid(), number)
    with pytest.raises(Preempted, match="with a checkpoint"):
        control.run(work)


def test_a_second_signal_changes_nothing() -> None:
    control = Control()
    again = threading.Event()

    def work() -> None:
        assert control.stopping.wait(10)
        soon(os.kill, os.getpid(), signal.SIGTERM)
        soon(again.set)
        assert again.wait(10)
        time.sleep(0.3)  # a checkpoint is being written
        raise Preempted("with a checkpoint")

    soon(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted, match="with a checkpoint"):
        control.run(work)


def test_work_that_does_not_heed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "GRACE_SECONDS", 0.5)
    forever = threading.Event()
    soon(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted, match="from what is committed"):
        Control().run(lambda: forever.wait(30) and None)
    forever.set()


def test_work_that_is_committing_has_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "GRACE_SECONDS", 0.3)
    control = Control()

    def work() -> None:
        control.commit_begins()
        control.stopping.wait(10)
        time.sleep(1.0)
        raise Preempted("committed")

    soon(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted, match=r"^committed"):
        control.run(work)


def test_a_lost_peer_ends_work_that_is_stuck() -> None:
    control = Control()
    forever = threading.Event()
    soon(control.give_up, TemporaryError("rank 1 has not moved"))
    with pytest.raises(TemporaryError, match="rank 1"):
        control.run(lambda: forever.wait(30) and None)
    forever.set()


def test_a_tear_down_that_hangs_or_fails_does_not_undo_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_TEARDOWN_SECONDS", 0.2)
    forever = threading.Event()
    began = time.monotonic()
    run_module._bounded(lambda: forever.wait(30), "leaving")
    assert time.monotonic() - began < 5.0
    forever.set()

    def fail() -> None:
        raise RuntimeError("connection reset")

    run_module._bounded(fail, "leaving")
