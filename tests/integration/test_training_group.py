"""The drafters' group with real processes: equal sums everywhere, and a bounded end when a rank is lost."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from dflash.errors import DflashError, TemporaryError
from dflash.training.group import Group
from tests.support.processes import free_port, start_function


def join(rank: int, world: int, port: int, lost_seconds: float = 30.0) -> Group:
    def lost(sentence: str) -> None:
        os.write(2, f"{sentence}\n".encode())
        os._exit(75)

    return Group(
        rank,
        world,
        f"127.0.0.1:{port}",
        backend="gloo",
        join_seconds=20.0,
        collective_seconds=60.0,
        on_lost=lost,
        lost_seconds=lost_seconds,
    )


def child(pipe: Connection, body: Callable[..., Any], rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(body(rank, world, port, pipe))
    except DflashError as error:
        pipe.send(error)
        os._exit(int(error.exit_code))


def start(body: Callable[..., Any], world: int) -> tuple[list[BaseProcess], list[Connection]]:
    port = free_port()
    started = [start_function(child, body, rank, world, port) for rank in range(world)]
    return [process for process, _ in started], [pipe for _, pipe in started]


def sums_and_broadcasts(
    rank: int, world: int, port: int, pipe: Connection
) -> tuple[list[float], list[float], str]:
    group = join(rank, world, port)
    total = torch.full((5,), float(rank + 1))
    group.sum(total)
    told = torch.full((3,), float(rank))
    group.broadcast([told])
    shared = group.share("word", "hello" if rank == 0 else None, 10.0)
    group.barrier("end", 10.0)
    group.leave()
    return total.tolist(), told.tolist(), shared


def test_ranks_add_up_and_hear_rank_0() -> None:
    processes, pipes = start(sums_and_broadcasts, 3)
    for pipe in pipes:
        assert pipe.poll(60)
        assert pipe.recv() == ([6.0] * 5, [0.0] * 3, "hello")
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


def sum_until_lost(rank: int, world: int, port: int, pipe: Connection) -> None:
    group = join(rank, world, port, lost_seconds=4.0)
    pipe.send("joined")
    while True:
        group.sum(torch.ones(1000))
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_group_with_75(victim: int, how: signal.Signals) -> None:
    processes, pipes = start(sum_until_lost, 2)
    for pipe in pipes:
        assert pipe.poll(60)
        assert pipe.recv() == "joined"
    time.sleep(1.5)
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, how)
    try:
        deadline = time.monotonic() + 20
        for rank, process in enumerate(processes):
            if rank != victim:
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode == 75
    finally:
        processes[victim].kill()
        processes[victim].join(10)


def leave_early(rank: int, world: int, port: int, pipe: Connection) -> str:
    group = join(rank, world, port, lost_seconds=2.0)
    if rank == 1:
        group.leave()
        return "left"
    time.sleep(5.0)  # longer than a silent rank is waited for
    group.leave()
    return "left"


def test_a_rank_that_leaves_is_not_lost() -> None:
    processes, pipes = start(leave_early, 2)
    for pipe in pipes:
        assert pipe.poll(60)
        assert pipe.recv() == "left"
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


def test_a_group_that_does_not_come_together_says_so() -> None:
    with pytest.raises(TemporaryError, match="rank 1 of 2 could not meet the other drafters"):
        Group(
            1,
            2,
            f"127.0.0.1:{free_port()}",
            backend="gloo",
            join_seconds=2.0,
            collective_seconds=5.0,
            on_lost=lambda sentence: None,
        )


def test_a_group_of_one_needs_nobody() -> None:
    group = Group(
        0,
        1,
        "nowhere:1",
        backend="gloo",
        join_seconds=1.0,
        collective_seconds=1.0,
        on_lost=lambda sentence: None,
    )
    tensor = torch.ones(3)
    group.sum(tensor)
    group.broadcast([tensor])
    group.barrier("end", 1.0)
    assert group.share("word", "alone", 1.0) == "alone"
    group.leave()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
