"""A target over several devices of one machine: a process for each, all of which run the same forward.

Layers are split by the plan that transformers has for the architecture; what a layer gives out is whole on
every rank, so rank 0, the leader, has complete states and talks to the world alone. Its followers are
children of it. They get each batch over their standard input and not by a collective, so that nobody waits
in one while there is nothing to do, and a follower whose leader has gone reads the end of its input. A
forward that fails on one rank leaves the others inside a collective, so then the whole target ends.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dflash.channel.link import host_store, join_store
from dflash.errors import ConfigurationError, TemporaryError
from dflash.model.facts import TargetFacts
from dflash.model.states import States
from dflash.model.target import TargetModel, load_target
from dflash.processes import TERMINATION_LOG, dying_with_parent
from dflash.resource import Drafter
from dflash.training.device import device_of

log = logging.getLogger(__name__)

FORWARD_SECONDS = 300.0
"""Longest time for one batch; a follower that hangs never ends it."""
_GOODBYE_SECONDS = 5.0

FollowerCommand = Callable[[int, int], list[str]]
"""Command line of a follower, from its rank and the port of the leader's rendezvous on this machine."""


def check_devices(facts: TargetFacts, devices: int) -> None:
    """ConfigurationError when the target's heads cannot be spread evenly over so many devices."""
    sizes = {"attention heads": facts.heads, "key-value heads": facts.kv_heads}
    sizes["columns of its MLP"] = facts.moe.intermediate_size if facts.moe else facts.intermediate_size
    uneven = [f"{size} {what}" for what, size in sizes.items() if size % devices]
    if uneven:
        possible = [n for n in range(1, 65) if all(size % n == 0 for size in sizes.values())]
        raise ConfigurationError(
            f"training.targetDevices: {devices} does not divide the target's {' and '.join(uneven)}; "
            f"use one of {', '.join(map(str, possible))}"
        )


class ParallelTarget:
    """The leader: captures like a `TargetModel`, with its followers."""

    def __init__(
        self, drafter: Drafter, command: FollowerCommand, on_lost: Callable[[TemporaryError], None]
    ) -> None:
        """Start the followers and load every rank's part. Raises what `load_target` does.

        `on_lost` is called from a thread when a follower ends or hangs. It must end the process, since a
        collective that waits cannot be interrupted.
        """
        training = drafter.spec.training
        seconds = float(training.startup_deadline_seconds)
        self._on_lost = on_lost
        self._closing = threading.Event()
        store = host_store("127.0.0.1")
        self._followers = [_start(command(rank, store.port)) for rank in range(1, training.target_devices)]
        self._began: float | None = None
        threading.Thread(target=self._watch, name="followers-watch", daemon=True).start()
        _join(0, training.target_devices, store, training.backend, seconds)
        target = _load(drafter, 0)
        self._target = target
        self.facts, self.fingerprint, self.device = target.facts, target.fingerprint, target.device
        log.info("the target is spread over %d devices", training.target_devices)

    def capture(self, batch: Sequence[NDArray[np.int32]], taps: Sequence[int], final: bool) -> list[States]:
        """As `TargetModel.capture`. ValueError for ids that are none; any other error is the target's end."""
        for ids in batch:
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.facts.vocab_size:
                raise ValueError(f"a token id is outside the vocabulary of {self.facts.vocab_size:,}")
        self._began = time.monotonic()
        try:
            order = _write_order(batch, taps, final)
            for follower in self._followers:
                assert follower.stdin is not None
                follower.stdin.write(order)
                follower.stdin.flush()
            return self._target.capture(batch, taps, final)
        except (OSError, RuntimeError) as error:
            raise TemporaryError(
                f"a forward over {1 + len(self._followers)} devices failed ({str(error).splitlines()[0]}), "
                "which leaves them out of step: the target ends, and is started again"
            ) from error
        finally:
            self._began = None

    def close(self) -> None:
        """End the followers."""
        self._closing.set()
        for follower in self._followers:
            assert follower.stdin is not None
            with contextlib.suppress(OSError):  # it has ended already
                follower.stdin.close()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for follower in self._followers:
            try:
                follower.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()

    def _watch(self) -> None:
        while not self._closing.wait(1.0):
            if (problem := self._problem()) is not None and not self._closing.is_set():
                self._on_lost(problem)
                return

    def _problem(self) -> TemporaryError | None:
        """What makes going on pointless, whatever this process is stuck in."""
        for rank, follower in enumerate(self._followers, start=1):
            if (code := follower.poll()) is not None:
                return TemporaryError(
                    f"device {rank} of the target ended with exit code {code}; its last lines in this log "
                    "say why; the target is started again"
                )
        began = self._began
        if began is not None and time.monotonic() - began > FORWARD_SECONDS:
            return TemporaryError(
                f"a forward over {1 + len(self._followers)} devices has not ended in "
                f"{FORWARD_SECONDS:.0f} s: one of them hangs; the target is started again"
            )
        return None


def follow(drafter: Drafter, rank: int, port: int) -> None:
    """A follower's whole life: load a part, run along with the leader until its input ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the leader decides when to end
    training = drafter.spec.training
    seconds = float(training.startup_deadline_seconds)
    _join(rank, training.target_devices, join_store("127.0.0.1", port, seconds), training.backend, seconds)
    target = _load(drafter, rank)
    while (order := _read_order(sys.stdin.buffer)) is not None:
        batch, taps, final = order
        target.capture(batch, taps, final)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != TERMINATION_LOG}
    return subprocess.Popen(dying_with_parent(command), stdin=subprocess.PIPE, env=environment)


def _join(rank: int, world: int, store: TCPStore, backend: str, seconds: float) -> None:
    """Form the default process group, which transformers builds its mesh on."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    device = device_of(backend)
    if device.type == "cuda":
        if torch.cuda.device_count() < world:
            raise ConfigurationError(
                f"training.targetDevices: {world}, but this process sees {torch.cuda.device_count()} GPUs; "
                "give the target's pod as many, or lower it"
            )
        torch.cuda.set_device(rank)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a pod's own name need not resolve
    try:
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        raise TemporaryError(
            f"the target's {world} devices did not come together in {seconds:.0f} s "
            f"({str(error).splitlines()[0]}); the target is started again"
        ) from error


def _load(drafter: Drafter, rank: int) -> TargetModel:
    model, training = drafter.spec.target, drafter.spec.training
    device = device_of(training.backend)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    return load_target(model.model, model.revision, model.dtype, device, devices=training.target_devices)


def _write_order(batch: Sequence[NDArray[np.int32]], taps: Sequence[int], final: bool) -> bytes:
    """A line of JSON, then the ids of all samples."""
    head = {"lengths": [len(ids) for ids in batch], "taps": list(taps), "final": final}
    return orjson.dumps(head) + b"\n" + np.concatenate(batch).astype("<i4").tobytes()


def _read_order(stream: IO[bytes]) -> tuple[list[NDArray[np.int32]], list[int], bool] | None:
    """What `_write_order` wrote; None at the end of the stream, also in the middle of an order."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    head = orjson.loads(line)
    lengths: list[int] = head["lengths"]
    data = stream.read(4 * sum(lengths))
    if len(data) != 4 * sum(lengths):
        return None
    ids = np.frombuffer(data, dtype="<i4").astype(np.int32)
    return np.split(ids, np.cumsum(lengths)[:-1]), head["taps"], head["final"]
