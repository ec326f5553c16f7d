"""End-to-end rate of training through the channel against the slower side alone: one target, and two.

A target and a drafter of like cost, both of real arithmetic (matrix products over the sample's tokens on
one core). `efficiency_1_1` is samples per second through the channel ÷ samples per second of whichever
side is slower when it runs alone: the target with nobody to send to, the drafter with states at hand.
`efficiency_2_1` has two targets, each half as fast as the drafter. Everything is measured in one run, in
turns, and the medians are compared.

On a machine with fewer processors than processes the sides share them. Then no pipeline can run as fast
as its slower side alone, so the processes' compute is timed instead: each side's work is a wait of the
length that the arithmetic took alone, which leaves the channel's own use of the processors in the result.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dflash.channel.interface import Identity
from dflash.model.states import States
from tests.support.channel_load import block_capture, connect, requests, target_process
from tests.support.channel_peers import Folder

IDENTITY = Identity(fingerprint="load", taps=(1, 7, 13), hidden_size=576, dtype="bfloat16", final=True)
TOKENS = 256
SECONDS_PER_SAMPLE = 0.04
TOKEN_BUDGET = 4 * TOKENS


def arithmetic(seconds: float) -> Callable[[], None]:
    """Matrix products that take about so long alone on one core."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    products = max(1, round(seconds / ((time.perf_counter() - began) / 20)))

    def work() -> None:
        for _ in range(products):
            a @ b

    return work


def waiting(seconds: float) -> Callable[[], None]:
    """The same length of time, on a device of its own."""
    return partial(time.sleep, seconds)


def working_capture(seconds: float, make_work: Callable[[float], Callable[[], None]]):
    """A target that works for so many seconds per sample."""
    torch.set_num_threads(1)
    states_of = block_capture(IDENTITY, TOKENS)
    work = make_work(seconds)

    def capture(batch: list[np.ndarray]) -> list[States]:
        for _ in batch:
            work()
        return states_of(batch)

    return capture


def alone(work: Callable[[], None], samples: int) -> float:
    """Seconds for so many samples with nothing else running."""
    began = time.perf_counter()
    for _ in range(samples):
        work()
    return time.perf_counter() - began


def efficiency(targets: int, make_work, samples: int, repeats: int) -> float:
    """Rate through the channel ÷ the rate of the slower side alone."""
    work = make_work(SECONDS_PER_SAMPLE)
    capture_work = make_work(targets * SECONDS_PER_SAMPLE)
    through, slower = [], []
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        processes = [
            target_process(
                folder,
                index,
                partial(working_capture, targets * SECONDS_PER_SAMPLE, make_work),
                IDENTITY,
                token_budget=TOKEN_BUDGET,
            )
            for index in range(targets)
        ]
        for process in processes:
            process.__enter__()
        try:
            with connect(folder, IDENTITY, queue_depth=60) as client:
                for _ in client.stream(requests(20, TOKENS)):
                    pass
                for _ in range(repeats):
                    drafter = alone(work, samples)
                    target = alone(capture_work, samples) / targets
                    slower.append(max(drafter, target))
                    stream = client.stream(requests(samples + 1, TOKENS))
                    next(stream)
                    began = time.perf_counter()
                    for _ in stream:
                        work()
                    through.append(time.perf_counter() - began)
                stats = client.stats()
        finally:
            for process in processes:
                process.__exit__(None, None, None)
    figure = statistics.median(slower) / statistics.median(through)
    idle = [f"{target.idle_share:.0%}" for target in stats.targets if target.idle_share is not None]
    print(f"{targets}:1: efficiency {figure:.3f}, drafter waits {stats.wait_share:.0%}, targets idle {idle}")
    return figure


def run(quick: bool) -> dict[str, float]:
    """The two figures."""
    torch.set_num_threads(1)
    samples, repeats = (100, 3) if quick else (500, 7)
    processors = len(os.sched_getaffinity(0))
    figures = {}
    for targets in (1, 2):
        make_work = arithmetic if processors > targets else waiting
        print(f"{targets}:1 on {processors} processors, work by {make_work.__name__}")
        figures[f"efficiency_{targets}_1"] = efficiency(targets, make_work, samples, repeats)
    return figures
