"""A target over two devices: the states of one, a run that ends like any, and a lost device told."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from dflash.channel.link import host_store, join_store
from dflash.model.target import load_target
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from tests.support.processes import start_function
from tests.support.tiny import FAMILIES, Family, save_tiny_target, tiny_target
from tests.support.training import TrainingRun

TAPS = (1, 3)
LENGTHS = (7, 33, 31, 1)


def samples() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, length).astype(np.int32) for length in LENGTHS]


def one_rank(pipe: object, folder: str, rank: int, port: int) -> None:
    """Capture over two devices; the states go to the pipe."""
    from datetime import timedelta

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    store = join_store("127.0.0.1", port, 30)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    target = load_target(folder, dtype="float32", devices=2)
    own = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in target.decoder.parameters())
    states = target.capture(samples(), TAPS, final=True)
    pipe.send((own, [(s.taps.numpy(), s.final.numpy()) for s in states]))  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_states_over_two_devices_are_those_of_one(family: Family) -> None:
    folder = str(tiny_target(family))
    whole = load_target(folder, dtype="float32")
    expected = whole.capture(samples(), TAPS, final=True)
    parameters = sum(p.numel() for p in whole.decoder.parameters())
    store = host_store("127.0.0.1")
    ranks = [start_function(one_rank, folder, rank, store.port) for rank in range(2)]
    for process, pipe in ranks:
        assert pipe.poll(90), "a rank has said nothing in 90 s"
        own, states = pipe.recv()
        assert own < 0.7 * parameters  # the layers are split, not copied
        for (taps, final), reference in zip(states, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(taps), reference.taps, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(torch.from_numpy(final), reference.final, rtol=1e-4, atol=1e-4)
        process.join(20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), "qwen3", layers=5)


@pytest.mark.timeout(300)
def test_a_run_with_a_spread_target_ends_as_with_a_whole_one(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with TrainingRun(s3_server, store.under("whole"), tmp_path / "whole", target=target) as run:
        run.complete()
        expected = run.weights()
    spread = {"targetDevices": 2}
    with TrainingRun(
        s3_server, store.under("spread"), tmp_path / "spread", target=target, training=spread
    ) as run:
        serving = run.target()
        (drafter,) = run.drafters()
        assert drafter.wait(120) == 0, drafter.said()[-4000:]
        assert serving.wait(60) == 0, serving.said()[-4000:]
        assert "the target is spread over 2 devices" in serving.said()
        for name, tensor in run.weights().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(300)
def test_a_lost_device_ends_the_target_to_be_started_again_and_none_is_left_behind(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with TrainingRun(s3_server, store, tmp_path, target=target, training={"targetDevices": 2}) as run:
        serving = run.target()
        serving.wait_for("serves on", 90)
        (follower,) = psutil.Process(serving.pid).children()
        follower.send_signal(signal.SIGKILL)
        assert serving.wait(30) == 75
        assert "device 1 of the target ended with exit code -9" in serving.said()
        again = run.target(1)
        again.wait_for("serves on", 90)
        (follower,) = psutil.Process(again.pid).children()
        again.send(signal.SIGKILL)
        again.wait()
        deadline = time.monotonic() + 10
        while follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "a follower outlives its leader"
            time.sleep(0.1)


def test_heads_that_cannot_be_spread_are_told_with_what_can(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with TrainingRun(s3_server, store, tmp_path, target=target, training={"targetDevices": 4}) as run:
        serving = run.target()
        assert serving.wait(60) == 78
        assert (
            "training.targetDevices: 4 does not divide the target's 2 key-value heads; use one of 1, 2"
            in serving.said()
        )
