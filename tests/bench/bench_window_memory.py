"""Growth of both sides' memory over 10,000 samples, with targets faster and with drafters faster.

`growth_mib` is the greater growth of the two processes' resident memory between the first tenth of the
samples and the last tenth (each the mean of several looks). Lengths vary, so that buffers of all sizes are
needed; a slow consumer keeps the window full, a slow target keeps it empty.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from dflash.channel.interface import Identity, Request
from tests.support.channel_load import block_capture, connect, target_process
from tests.support.channel_peers import Folder

SAMPLES = 10_000
IDENTITY = Identity(fingerprint="load", taps=(1, 3, 5), hidden_size=64, dtype="bfloat16", final=True)
LONGEST = 1024


def varied(count: int) -> Iterator[Request]:
    """Samples of 16 to 1,024 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, LONGEST + 1, count)
    return (Request(i, f"s{i}", np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths))


def slow_capture(pause: float):
    """A target that takes its time."""
    fast = block_capture(IDENTITY, LONGEST)

    def capture(batch):
        time.sleep(pause * len(batch))
        return fast(batch)

    return capture


def growth(consumer_pause: float, target_pause: float, samples: int) -> float:
    """Greater growth in MiB of the two processes."""
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        with (
            target_process(folder, 0, partial(slow_capture, target_pause), IDENTITY) as process,
            connect(folder, IDENTITY) as client,
        ):
            sides = {"target": psutil.Process(process.pid), "drafter": psutil.Process()}
            seen: dict[str, list[int]] = {side: [] for side in sides}
            for reply in client.stream(varied(samples)):
                if consumer_pause:
                    time.sleep(consumer_pause)
                if reply.request.index % (samples // 100) == 0:
                    for side, watched in sides.items():
                        seen[side].append(watched.memory_info().rss)
    worst = 0.0
    for side, sizes in seen.items():
        # the first tenth is warm-up: what it reaches is what the window needs
        early, late = statistics.mean(sizes[10:20]), statistics.mean(sizes[-10:])
        print(f"{side}: {early / 2**20:.1f} MiB, at the end {late / 2**20:.1f} MiB")
        worst = max(worst, (late - early) / 2**20)
    return worst


def run(quick: bool) -> dict[str, float]:
    """One figure, over both cases."""
    samples = SAMPLES if quick else 5 * SAMPLES
    print("a slow consumer:")
    slow_consumer = growth(0.0005, 0.0, samples)
    print("a slow target:")
    slow_target = growth(0.0, 0.0005, samples)
    return {"growth_mib": max(slow_consumer, slow_target)}
