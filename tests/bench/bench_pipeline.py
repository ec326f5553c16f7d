"""Samples per second of targets and drafter together, against the slower of the two alone.

Target alone: a target process serves a client that throws the states away. Drafter alone: the training
loop with the same states, replayed from memory. Together: the training loop fed by the target process.
Each is one pass over the same samples, in turns; the figure is of medians. One thread a process.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dflash.channel.client import HiddenStateClient
from dflash.channel.interface import Reply, Request
from dflash.channel.keys import KeyPair
from dflash.channel.members import MemberDirectory
from dflash.data.dataset import Dataset
from dflash.model.drafter import DFlashDrafter
from dflash.model.target import load_tables
from dflash.objective.weights import Objective
from dflash.resource.load import load_resource
from dflash.storage.embedded import EmbeddedStore
from dflash.training.feed import Feed, Stream
from dflash.training.figures import SumsLayout
from dflash.training.group import Group
from dflash.training.optimizer import FlatOptimizer
from dflash.training.order import Order
from dflash.training.run import plan_of
from dflash.training.samples import TrainingSet
from dflash.training.trainer import Learner, Trainer
from tests.support.processes import free_port
from tests.support.tiny import save_tiny_target
from tests.support.training import DATASET, TrainingRun

_CPU = torch.device("cpu")


class Side:
    """The drafter's process: one loop that is fed by any stream."""

    def __init__(self, training: TrainingRun) -> None:
        self.resource = load_resource(training.resource_file)
        self.plan = plan_of(self.resource)
        self.spec = self.resource.spec.training
        self.samples = TrainingSet(
            Dataset.open(training.store, DATASET), self.spec.max_length, self.plan.facts.vocab_size
        )
        self.order = Order(len(self.samples), self.spec.batch_size, self.spec.epochs, self.spec.seed)
        self.directory = MemberDirectory(training.store, training.run)
        self.attempts = itertools.count()
        self.tables = load_tables(self.resource.spec.target.model, None, self.spec.dtype)

    def client(self) -> HiddenStateClient:
        keys, attempt = KeyPair.generate(), next(self.attempts)
        self.directory.publish("drafter", 0, keys, attempt=attempt)
        return HiddenStateClient(
            self.directory.targets,
            self.plan.identity,
            run="a" * 16,
            attempt=attempt,
            index=0,
            keys=keys,
            queue_depth=self.spec.queue_depth,
            backend="gloo",
        )

    def requests(self) -> Iterator[Request]:
        places = (place for _, places in self.order.from_step(0) for place in places)
        for index, place in enumerate(places):
            sample = self.samples[place.sample]
            yield Request(index, sample.sample_id, sample.ids)

    def train(self, stream: Stream) -> float:
        """Samples per second from the first sample to the last update."""
        drafter = DFlashDrafter(self.plan.shape, 0)
        optimizer = FlatOptimizer(
            drafter,
            self.spec,
            sums=SumsLayout(self.plan.shape.block_size).size,
            dtype=getattr(torch, self.spec.dtype),
        )
        objective = Objective.from_loss(self.spec.loss, self.plan.shape.block_size)
        group = Group(
            0,
            1,
            f"127.0.0.1:{free_port()}",
            backend="gloo",
            join_seconds=10,
            collective_seconds=60,
            on_lost=lambda sentence: None,
        )
        feed = Feed(stream, self.samples, self.order, rank=0, world=1, first_step=0)
        trainer = Trainer(
            self.spec,
            Learner(drafter, self.tables, objective, optimizer, _CPU),
            group,
            self.order,
            feed,
            step=0,
            end=lambda: False,
            stop=lambda: False,
            after_step=lambda _: None,
        )
        began = time.perf_counter()
        trainer.run()
        seconds = time.perf_counter() - began
        feed.close()
        return self.count / seconds

    @property
    def count(self) -> int:
        return self.spec.epochs * len(self.samples)

    def null(self) -> tuple[float, list[Reply]]:
        """Samples per second of the target alone, and what it sent. Connecting is not counted."""
        with self.client() as client:
            stream = client.stream(self.requests())
            replies = [next(stream)]
            began = time.perf_counter()
            replies += stream
            return (len(replies) - 1) / (time.perf_counter() - began), replies

    def together(self) -> float:
        with self.client() as client:

            def linked(requests: Iterator[Request]) -> Iterator[Reply]:
                return client.stream(requests)

            while not any(target.live for target in client.stats().targets):
                time.sleep(0.01)
            return self.train(linked)


def run(quick: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    rounds = 3 if quick else 5
    with tempfile.TemporaryDirectory() as name, EmbeddedStore(Path(name, "s3")) as server:
        folder = Path(name)
        target = save_tiny_target(folder / "target", layers=12, hidden=384, vocabulary=4096)
        training = TrainingRun(
            server,
            server.store().under("bench"),
            folder / "run",
            samples=160,
            target=target,
            drafter={"layers": 1, "blockSize": 8, "taps": [1, 4, 7]},
            training={
                "epochs": 2,  # a run so short that filling the pipeline shows is not what anybody has
                "batchSize": 8,
                "anchors": 16,
                "microBatchTokens": 512,
                "targetBatchTokens": 512,
                "queueDepth": 60,
            },
        )
        with training:
            training.target().wait_for("serves on")
            side = Side(training)
            _, replies = side.null()  # also warms the target up
            side.train(lambda requests: _replay(requests, replies))
            figures: dict[str, list[float]] = {"target": [], "drafter": [], "together": []}
            for _ in range(rounds):
                figures["target"].append(side.null()[0])
                figures["drafter"].append(side.train(lambda requests: _replay(requests, replies)))
                figures["together"].append(side.together())
                print({side: round(rates[-1], 1) for side, rates in figures.items()}, "samples/s")
        medians = {side: statistics.median(rates) for side, rates in figures.items()}
        return {
            "efficiency": medians["together"] / min(medians["target"], medians["drafter"]),
            "target_samples_per_second": medians["target"],
            "drafter_samples_per_second": medians["drafter"],
        }


def _replay(requests: Iterator[Request], replies: list[Reply]) -> Iterator[Reply]:
    """What was received before; requests are read as the channel would read them."""
    for request, reply in zip(requests, replies, strict=True):
        assert request.sample_id == reply.request.sample_id
        yield reply
