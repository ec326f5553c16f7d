"""Load for the channel's benchmarks: target processes with states of a chosen size, and their clients.

The states are slices of one random block, so that a target does nothing but serve: what a benchmark
measures is the channel, or a compute that it names itself (`work`, seconds of real arithmetic).
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from dflash.channel.client import HiddenStateClient
from dflash.channel.interface import Identity, Member, Request
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.server import HiddenStateServer
from dflash.model.states import States
from tests.support.channel_peers import Folder

WIDE = Identity(fingerprint="load", taps=(1, 7, 13, 20, 27), hidden_size=576, dtype="bfloat16", final=True)

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.channel_load"])


def block_capture(identity: Identity, tokens: int) -> Callable[[list[np.ndarray]], list[States]]:
    """States are slices of one block, one behind the other as long as it reaches: nothing is computed."""
    dtype = torch.bfloat16 if identity.dtype == "bfloat16" else torch.float32
    taps = torch.randn(tokens, identity.hidden_size * len(identity.taps)).to(dtype)
    final = torch.randn(tokens, identity.hidden_size).to(dtype) if identity.final else None

    def capture(batch: list[np.ndarray]) -> list[States]:
        states, start = [], 0
        for ids in batch:
            start = start if start + len(ids) <= tokens else 0
            part = slice(start, start + len(ids))
            states.append(States(taps[part], final[part] if final is not None else None))
            start += len(ids)
        return states

    return capture


def serve(folder: Path, index: int, make_capture, identity: Identity, options: dict, results) -> None:
    """Body of a target process; at SIGTERM it sends its statistics and its memory."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    members = Folder(folder)
    keys = KeyPair.generate()
    server = HiddenStateServer(
        make_capture(), identity, run="bench", keys=keys, authority=Authority(members.public_keys), **options
    )
    signal.signal(signal.SIGTERM, lambda *_: server.request_stop())
    server.start()
    instance = os.urandom(8).hex()
    members.publish(Member("target", index, instance, "127.0.0.1", server.port, keys.public, 0, "load"))
    server.serve()
    results.send(dataclasses.asdict(server.stats()))


@contextlib.contextmanager
def target_process(
    folder: Folder, index: int, make_capture, identity: Identity = WIDE, **options
) -> Iterator:
    """A target in a process of its own, listening."""
    _, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(
        target=serve, args=(folder.folder, index, make_capture, identity, options, sender), daemon=True
    )
    process.start()
    try:
        deadline = time.monotonic() + 60
        while not (folder.folder / f"target-{index}.json").exists():
            assert process.is_alive(), "the target did not start"
            assert time.monotonic() < deadline, "the target did not start in a minute"
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.join(20)
        process.kill()


def connect(folder: Folder, identity: Identity = WIDE, **options) -> HiddenStateClient:
    """A client in this process."""
    return HiddenStateClient(
        folder.members, identity, run="bench", attempt=1, index=0, keys=folder.admit(0), **options
    )


def requests(count: int, tokens: int) -> Iterator[Request]:
    """Samples of equal length."""
    ids = np.zeros(tokens, dtype=np.int32)
    return (Request(index, f"s{index}", ids) for index in range(count))
