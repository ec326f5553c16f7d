"""Throughput of a whole link against raw Gloo send and receive of the same bytes, between two processes.

The link does all that training does: requests, packing, announcements, copies into the send buffer, a
checksum now and then, checks of every number on receipt, order and hand-over. Raw Gloo sends one buffer of
a whole batch's bytes again and again, and looks at nothing. Both move the same number of bytes, in turns;
each turn of the link is compared with the raw one before it, and the ratios are medians. Samples of 4,096
and of 128 tokens with five taps and the final state of a 576-wide model.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from dflash.channel.link import DRAFTER_RANK, TARGET_RANK, TensorLink, host_store, join_store
from dflash.channel.wire import flat_bytes
from tests.support.channel_load import FORKS, WIDE, block_capture, connect, requests, target_process
from tests.support.channel_peers import Folder

TOKEN_BUDGET = 16_384
CPU = torch.device("cpu")


def raw_receiver(port: int, size: int, commands, results) -> None:
    """Receives as many buffers as it is told, and says when it has them."""
    torch.set_num_threads(1)
    store = join_store("127.0.0.1", port, 30)
    link = TensorLink(store, "raw", DRAFTER_RANK, address="127.0.0.1", backend="gloo", timeout=60, device=CPU)
    buffer = torch.zeros(size, dtype=torch.uint8)
    while (count := commands.recv()) is not None:
        for _ in range(count):
            link.finish(link.start_receive(buffer))
        results.send(time.perf_counter())


class RawPair:
    """Two ranks that do nothing else."""

    def __init__(self, size: int) -> None:
        store = host_store("127.0.0.1")
        self.commands, child_commands = FORKS.Pipe()
        child_results, self.results = FORKS.Pipe()
        self.process = FORKS.Process(
            target=raw_receiver, args=(store.port, size, child_commands, child_results), daemon=True
        )
        self.process.start()
        self.link = TensorLink(
            store, "raw", TARGET_RANK, address="127.0.0.1", backend="gloo", timeout=60, device=CPU
        )
        self.buffer = torch.randint(0, 256, (size,), dtype=torch.uint8)

    def seconds(self, count: int) -> float:
        began = time.perf_counter()
        self.commands.send(count)
        for _ in range(count):
            self.link.finish(self.link.start_send(self.buffer))
        return self.results.recv() - began

    def close(self) -> None:
        self.commands.send(None)
        self.process.join(10)


def ratio(tokens: int, repeats: int, sends: int) -> float:
    """Link rate ÷ raw rate for samples of so many tokens."""
    samples = TOKEN_BUDGET // tokens * sends
    size = flat_bytes(TOKEN_BUDGET, WIDE)
    raw, linked = [], []
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        capture = partial(block_capture, WIDE, TOKEN_BUDGET)
        with target_process(folder, 0, capture, token_budget=TOKEN_BUDGET):
            pair = RawPair(size)
            depth = 3 * TOKEN_BUDGET // tokens
            with connect(folder, queue_depth=depth) as client:
                for _ in client.stream(requests(samples, tokens)):
                    pass
                pair.seconds(sends)
                for _ in range(repeats):
                    raw.append(pair.seconds(sends))
                    began = time.perf_counter()
                    for _ in client.stream(requests(samples, tokens)):
                        pass
                    linked.append(time.perf_counter() - began)
            pair.close()
    rate = size * sends / statistics.median(linked)
    figure = statistics.median(r / k for r, k in zip(raw, linked, strict=True))
    print(f"{tokens} tokens: link {rate / 1e9:.2f} GB/s, {figure:.2f} of raw Gloo")
    return figure


def run(quick: bool) -> dict[str, float]:
    """The two ratios."""
    repeats, sends = (5, 20) if quick else (15, 40)
    return {
        "ratio_4096": ratio(4096, repeats, sends),
        "ratio_128": ratio(128, repeats, sends),
    }
