"""Targets and drafters for the channel's tests: processes with a cheap, deterministic capture.

A target whose states are a function of the token ids, so that whoever receives them can check each
number. Members lie in a folder as JSON files. A fault names one thing that a target does wrong.
Processes are forked from a server that has imported torch already, so they start in milliseconds.
"""

import ctypes
import dataclasses
import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dflash.channel import messages
from dflash.channel.client import HiddenStateClient
from dflash.channel.control import Control
from dflash.channel.interface import Identity, Member, Request, Timeouts
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.sending import Sender
from dflash.channel.server import HiddenStateServer
from dflash.model.states import States

IDENTITY = Identity(fingerprint="tiny-1", taps=(1, 3), hidden_size=8, dtype="bfloat16", final=True)


def expected_states(ids: np.ndarray, identity: Identity) -> States:
    """States that tell every token, position and column apart (as far as bf16 can)."""
    taps_width = identity.hidden_size * len(identity.taps)
    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
    columns = torch.arange(taps_width)
    taps = ((tokens[:, None] * 31 + columns * 7 + torch.arange(len(ids))[:, None] * 3) % 251 - 125).float()
    dtype = torch.bfloat16 if identity.dtype == "bfloat16" else torch.float32
    final = (taps[:, : identity.hidden_size] * 0.5).to(dtype) if identity.final else None
    return States(taps.to(dtype), final)


def make_requests(count: int, seed: int = 0, longest: int = 40) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(i, f"sample-{i}", rng.integers(0, 1000, rng.integers(1, longest + 1), dtype=np.int32))
        for i in range(count)
    ]


class Folder:
    """Members as files: the same discovery as the store's, without a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, member: Member) -> None:
        path = self.folder / f"{member.name}.json"
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(dataclasses.asdict(member)))
        partial.rename(path)

    def members(self) -> list[Member]:
        return [Member(**json.loads(path.read_text())) for path in sorted(self.folder.glob("*.json"))]

    def public_keys(self) -> set[str]:
        return {member.public_key for member in self.members()}

    def admit(self, index: int = 0, attempt: int = 1) -> KeyPair:
        """Publish a drafter, and return its keys."""
        keys = KeyPair.generate()
        self.publish(Member("drafter", index, os.urandom(8).hex(), "", 0, keys.public, attempt, ""))
        return keys


def break_wire(fault: str) -> None:
    """Make every sender of this process do one thing wrong."""
    transmit, send = Sender.transmit, Control.send
    batches = itertools.count()

    def faulty_transmit(tensors, transfers):
        last = transfers[-1]
        if fault == "corrupt":
            last = last.clone()
            last[len(last) // 3] ^= 1
        elif fault == "truncate":
            last = last[: len(last) // 2]
        elif fault == "delay" and next(batches) == 2:
            time.sleep(20.0)
        elif fault == "die mid-send" and next(batches) >= 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return transmit(tensors, [*transfers[:-1], last])

    def faulty_send(self, router, route, message):
        if fault == "wrong length" and message.kind == "batch":
            items = [item.model_copy(update={"length": item.length + 1}) for item in message.items]
            message = message.model_copy(update={"items": items})
        elif fault == "garbage" and message.kind == "batch":
            router.send_multipart([route, b'{"kind": "batch", "number": '])
            return
        elif fault == "cut off" and message.kind == "batch":
            router.send_multipart([route, messages.encode(message)[:-20]])
            return
        elif fault == "not asked for" and message.kind == "batch":
            items = [item.model_copy(update={"index": item.index + 10_000}) for item in message.items]
            message = message.model_copy(update={"items": items})
        send(self, router, route, message)

    Sender.transmit = staticmethod(faulty_transmit)
    Control.send = faulty_send


def faulty_capture(identity: Identity, fault: str, pace: float):
    """The deterministic capture, with one thing wrong."""
    batches = 0

    def capture(batch):
        nonlocal batches
        batches += 1
        time.sleep(pace * len(batch))
        if fault == "die mid-compute" and batches >= 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop mid-compute" and batches >= 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "out of memory":
            raise RuntimeError("out of memory: tried to allocate 3 GiB")
        if fault == "bad ids" and any(7 in ids[:1] for ids in batch):
            raise IndexError("token id 999999 is outside the vocabulary")
        states = [expected_states(ids, identity) for ids in batch]
        for sample in states:
            if fault == "nan":
                sample.taps[0, 3] = float("nan")
            elif fault == "inf":
                sample.taps[-1, -1] = float("inf")
            elif fault == "zeros":
                sample.taps[:, identity.hidden_size :] = 0.0
            elif fault == "constant":
                sample.final[:] = 1.5
        return states

    return capture


def enter_network(namespace: str) -> None:
    """Move this process into a network namespace made by `ip netns add`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        assert libc.setns(file.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())


def run_target(folder: Path, index: int, fault: str, options: dict, results) -> None:
    """The body of a target process; its statistics go to `results` when it ends by SIGTERM."""
    logging.basicConfig(level=logging.INFO, format=f"target-{index} %(levelname)s %(message)s", force=True)
    torch.set_num_threads(1)
    if (namespace := options.pop("namespace", None)) is not None:
        enter_network(namespace)
    address = options.setdefault("bind", "127.0.0.1")
    identity = dataclasses.replace(IDENTITY, **options.pop("identity", {}))
    members = Folder(folder)
    keys = KeyPair.generate()
    break_wire(fault)
    server = HiddenStateServer(
        faulty_capture(identity, fault, options.pop("pace", 0.0)),
        identity,
        run=options.pop("run", "run-1"),
        keys=keys,
        authority=Authority(members.public_keys),
        **options,
    )
    signal.signal(signal.SIGTERM, lambda *_: server.request_stop())
    server.start()
    published = KeyPair.generate() if fault == "publishes a wrong key" else keys
    instance = os.urandom(8).hex()
    fingerprint = identity.fingerprint
    members.publish(Member("target", index, instance, address, server.port, published.public, 0, fingerprint))
    server.serve()
    results.send(dataclasses.asdict(server.stats()))


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.channel_peers"])


class Target:
    """A target process of a test."""

    def __init__(self, folder: Folder, index: int, fault: str = "", **options: object) -> None:
        self.folder, self.index = folder, index
        self._before = {member.instance for member in folder.members()}
        self._results, sender = _FORKS.Pipe(duplex=False)
        self.process = _FORKS.Process(
            target=run_target, args=(folder.folder, index, fault, options, sender), daemon=True
        )
        self.process.start()
        sender.close()

    def wait_listening(self, timeout: float = 60.0) -> "Target":
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for member in self.folder.members():
                if member.name == f"target-{self.index}" and member.instance not in self._before:
                    return self
            assert self.process.is_alive(), "the target ended before it listened"
            time.sleep(0.02)
        raise AssertionError("the target did not listen in time")

    def send(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def finish(self) -> dict:
        """Stop it gently; its statistics."""
        self.process.terminate()
        stats = self._results.recv()
        self.process.join(15)
        assert self.process.exitcode == 0
        return stats


def run_drafter(folder: Path, index: int, signal_at: tuple[int, int]) -> None:
    """The body of a drafter process, which sends itself a signal at some sample."""
    at, signum = signal_at
    members = Folder(folder)
    keys = members.admit(index)
    client = HiddenStateClient(members.members, IDENTITY, run="run-1", attempt=1, index=index, keys=keys)
    for reply in client.stream(iter(make_requests(10_000))):
        if reply.request.index == at:
            os.kill(os.getpid(), signum)


def start_drafter(folder: Folder, index: int, signal_at: tuple[int, int]):
    """A drafter process of a test."""
    process = _FORKS.Process(target=run_drafter, args=(folder.folder, index, signal_at), daemon=True)
    process.start()
    return process


QUICK = Timeouts(hello=15, heartbeat=0.1, silence=2.0, request=30, transfer=5, discovery=0.1, no_target=60)


def connect(
    folder: Folder, *, index=0, attempt=1, identity=IDENTITY, keys=None, **options
) -> HiddenStateClient:
    """A client in this process, whose key the targets know."""
    options = {"run": "run-1", "timeouts": QUICK, **options}
    keys = keys or folder.admit(index, attempt)
    return HiddenStateClient(folder.members, identity, attempt=attempt, index=index, keys=keys, **options)


def check(reply, identity: Identity = IDENTITY) -> None:
    expected = expected_states(reply.request.ids, identity)
    assert torch.equal(reply.states.taps, expected.taps)
    assert (reply.states.final is None) == (expected.final is None)
    if expected.final is not None:
        assert torch.equal(reply.states.final, expected.final)


def indexes(replies: Iterator) -> list[int]:
    """Read a stream to its end, checking every number; the order in which samples came."""
    seen = []
    for reply in replies:
        check(reply)
        seen.append(reply.request.index)
    return seen
