"""The loop of one rank, with samples from memory: what changes the weights, and what must not."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from dflash.channel.interface import Reply, Request
from dflash.errors import DflashError, TemporaryError
from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape
from dflash.model.states import States
from dflash.model.target import Tables
from dflash.objective.batch import Sample
from dflash.objective.weights import Objective
from dflash.resource.training import Training
from dflash.training import trainer as trainer_module
from dflash.training.feed import Fed, Feed, Interrupted
from dflash.training.figures import SumsLayout, objective_metrics
from dflash.training.group import Group
from dflash.training.optimizer import FlatOptimizer
from dflash.training.order import Order
from dflash.training.samples import TrainingSample
from dflash.training.trainer import MAX_SKIPPED, Learner, Outcome, Trainer

VOCABULARY, HIDDEN = 40, 16
SHAPE = DraftShape(
    hidden_size=HIDDEN,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    vocab_size=VOCABULARY,
    block_size=4,
    taps=(1, 2),
    target_layers=5,
    mask_token_id=39,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_positions=256,
    layer_types=("full_attention",),
    sliding_window=None,
    tied=True,
)


def make_sample(index: int, supervised: int = 12) -> Sample:
    generator = torch.Generator().manual_seed(index)
    length = 18
    mask = torch.zeros(length, dtype=torch.bool)
    mask[length - supervised :] = supervised > 0
    return Sample(
        f"sample-{index}",
        torch.randint(0, VOCABULARY - 1, (length,), generator=generator),
        mask,
        States(
            torch.randn(length, 2 * HIDDEN, generator=generator),
            torch.randn(length, HIDDEN, generator=generator),
        ),
    )


@dataclass
class Source:
    """Stands in for a feed: samples by number, in the order of the run."""

    order: Order
    make: Callable[[int], Sample | None] = make_sample
    fail_at: int | None = None
    wait_seconds: float = 0.0
    taken: int = 0
    end_at: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def take(self, interrupted: Callable[[], bool]) -> Fed:
        if interrupted():
            raise Interrupted
        step, place = divmod(self.taken, self.order.batch_size)
        self.taken += 1
        sample = self.make(self.order.step(step)[place].sample)
        return Fed(sample, "" if sample else "it was refused")


def make_trainer(
    source: Source | None = None,
    *,
    tokens: int = 1000,
    steps: int = 6,
    after: Callable[[Trainer], None] | None = None,
) -> tuple[Trainer, FlatOptimizer]:
    training = Training(
        batch_size=4, anchors=4, learning_rate=0.01, micro_batch_tokens=max(32, tokens), dtype="float32"
    )
    order = Order(samples=4 * steps, batch_size=4, epochs=1, seed=0)
    source = source or Source(order)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    drafter = DFlashDrafter(SHAPE, seed=1)
    optimizer = FlatOptimizer(drafter, training, sums=SumsLayout(SHAPE.block_size).size, dtype=torch.float32)
    group = Group(
        0, 1, "unused:1", backend="gloo", join_seconds=1, collective_seconds=1, on_lost=lambda sentence: None
    )
    learner = Learner(drafter, Tables(table, table), Objective(), optimizer, torch.device("cpu"))
    trainer = Trainer(
        training,
        learner,
        group,
        order,
        source,  # type: ignore[arg-type]
        step=0,
        stop=source.stop.is_set,
        end=lambda: source.end_at is not None and trainer.step >= source.end_at,
        after_step=after or (lambda trainer: None),
    )
    return trainer, optimizer


def spoil(monkeypatch: pytest.MonkeyPatch, steps: range, optimizer: FlatOptimizer, trainer: Trainer) -> None:
    """Put an infinity into the gradient of some steps, as an overflow would."""
    step = trainer_module.block_step

    def spoilt(*arguments: Any, **settings: Any) -> Any:
        sums = step(*arguments, **settings)
        if trainer.step in steps:
            optimizer.gradient[3] = float("inf")
        return sums

    monkeypatch.setattr(trainer_module, "block_step", spoilt)


def test_a_run_trains_all_and_counts_it() -> None:
    trainer, optimizer = make_trainer()
    before = optimizer.masters.clone()
    assert trainer.run() is Outcome.DONE
    assert trainer.step == 6
    assert not torch.equal(optimizer.masters, before)
    sums, counts = trainer.read_totals()
    assert counts["samples"] == 24
    assert counts["tokens"] == 24 * 18
    assert counts["skipped"] == counts["weightless"] == counts["lost_samples"] == 0
    metrics = objective_metrics(sums)
    assert metrics["train/loss"] > 0
    assert 1.0 <= metrics["train/acceptance_length"] <= 4.0
    assert {"train/accuracy_slot_1", "train/accuracy_slot_2", "train/accuracy_slot_3"} <= metrics.keys()
    assert "train/accuracy_slot_0" not in metrics
    assert counts["gradient_norm"] > 0
    assert trainer.read_totals()[1]["samples"] == 0


def test_the_size_of_micro_batches_does_not_change_the_result() -> None:
    results = []
    for tokens in (32, 40, 1000):
        trainer, optimizer = make_trainer(tokens=tokens)
        trainer.run()
        results.append(optimizer.masters.clone())
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1], results[2], rtol=1e-4, atol=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    trainer, optimizer = make_trainer(after=lambda _: seen.append(optimizer.masters.clone()))
    spoil(monkeypatch, range(3, 4), optimizer, trainer)
    assert trainer.run() is Outcome.DONE
    assert torch.equal(seen[3], seen[2])
    assert not torch.equal(seen[4], seen[3])
    assert torch.isfinite(optimizer.masters).all()
    _, counts = trainer.read_totals()
    assert counts["skipped"] == 1


def test_many_such_steps_in_a_row_end_the_run_with_good_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, optimizer = make_trainer(steps=20)
    spoil(monkeypatch, range(2, 20), optimizer, trainer)
    with pytest.raises(DflashError, match=f"{MAX_SKIPPED} steps in a row"):
        trainer.run()
    assert trainer.step == 2 + MAX_SKIPPED
    assert torch.isfinite(optimizer.masters).all()


def test_bad_states_that_slip_through_do_not_reach_the_weights() -> None:
    def make(index: int) -> Sample:
        sample = make_sample(index)
        if index == 5:
            sample.states.taps[2, 1] = float("inf")
        return sample

    order = Order(24, 4, 1, 0)
    trainer, optimizer = make_trainer(Source(order, make))
    assert trainer.run() is Outcome.DONE
    assert torch.isfinite(optimizer.masters).all()
    sums, counts = trainer.read_totals()
    assert counts["skipped"] == 1
    assert torch.isfinite(sums.flatten()).all()


def test_steps_without_an_anchor_change_nothing_and_are_counted() -> None:
    trainer, optimizer = make_trainer(
        Source(Order(24, 4, 1, 0), lambda index: make_sample(index, supervised=0))
    )
    before = optimizer.masters.clone()
    assert trainer.run() is Outcome.DONE
    assert torch.equal(optimizer.masters, before)
    _, counts = trainer.read_totals()
    assert counts["weightless"] == 6
    assert counts["unanchored_samples"] == 24
    assert counts["skipped"] == 0


def test_a_sample_that_no_target_could_give_is_left_out_and_counted() -> None:
    trainer, _ = make_trainer(
        Source(Order(24, 4, 1, 0), lambda index: None if index == 7 else make_sample(index))
    )
    assert trainer.run() is Outcome.DONE
    _, counts = trainer.read_totals()
    assert counts["lost_samples"] == 1
    assert counts["samples"] == 23


def test_asked_to_stop_it_ends_at_a_boundary_and_the_step_given_up_counts_in_nothing() -> None:
    source = Source(Order(24, 4, 1, 0))

    def make(index: int) -> Sample:
        if source.taken == 4 * 2 + 3:
            source.stop.set()
        return make_sample(index)

    source.make = make
    seen: list[torch.Tensor] = []
    trainer, optimizer = make_trainer(source, after=lambda _: seen.append(optimizer.masters.clone()))
    assert trainer.run() is Outcome.STOPPED
    assert trainer.step == 2
    assert torch.equal(optimizer.masters, seen[1])
    _, counts = trainer.read_totals()
    assert counts["samples"] == 8


def test_told_that_the_run_should_end_it_is_done_before_its_last_step() -> None:
    source = Source(Order(24, 4, 1, 0), end_at=3)
    trainer, _ = make_trainer(source)
    assert trainer.run() is Outcome.DONE
    # The step in which the others hear of it is still trained.
    assert trainer.step == 4
    assert trainer.read_totals()[1]["samples"] == 16


class Rows:
    """Stands in for a training set."""

    def __getitem__(self, number: int) -> TrainingSample:
        sample = make_sample(number)
        return TrainingSample(
            sample.sample_id, sample.ids.numpy().astype(np.int32), sample.supervised.numpy()
        )


def make_feed(stream: Callable[[Iterator[Request]], Iterator[Reply]], rank: int = 0, world: int = 1) -> Feed:
    return Feed(stream, Rows(), Order(10, 4, 2, 0), rank=rank, world=world, first_step=1)  # type: ignore[arg-type]


def test_a_feed_asks_in_order_from_its_step_on() -> None:
    asked: list[Request] = []

    def stream(requests: Iterator[Request]) -> Iterator[Reply]:
        for request in requests:
            asked.append(request)
            yield Reply(request, make_sample(int(request.sample_id.split("-")[1])).states)

    feed = make_feed(stream, rank=1, world=3)
    order = Order(10, 4, 2, 0)
    expected = [place.sample for _, places in order.from_step(1, 1, 3) for place in places]
    for number in expected:
        fed = feed.take(lambda: False)
        assert fed.sample is not None
        assert fed.sample.sample_id == f"sample-{number}"
    assert [request.index for request in asked] == list(range(len(expected)))
    feed.close()


def test_what_ends_the_channel_reaches_the_trainer() -> None:
    def stream(requests: Iterator[Request]) -> Iterator[Reply]:
        yield Reply(next(requests), make_sample(0).states)
        raise TemporaryError("no target has been there for 600 s")

    feed = make_feed(stream)
    feed.take(lambda: False)
    with pytest.raises(TemporaryError, match="no target has been there"):
        feed.take(lambda: False)


def test_a_wait_for_samples_can_be_interrupted_and_is_measured() -> None:
    released = threading.Event()

    def stream(requests: Iterator[Request]) -> Iterator[Reply]:
        released.wait(10)
        yield Reply(next(requests), make_sample(0).states)

    feed = make_feed(stream)
    polls = iter([False, False, True])
    with pytest.raises(Interrupted):
        feed.take(lambda: next(polls))
    assert feed.wait_seconds > 0.1
    released.set()
    feed.close()
