"""What rank 0 reports and decides between steps."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash.channel.interface import ClientStats, TargetStats
from dflash.errors import DflashError
from dflash.objective.step import StepSums
from dflash.resource.training import Checkpoint, Training
from dflash.training.figures import COUNTS
from dflash.training.reporter import Reporter, Run

STATS = ClientStats(
    status="streaming",
    depth=5,
    causes={"tap 1 is not finite": 12},
    targets=(TargetStats("target-0", True, 3, 300, 10, 0.4),),
)


def sums(steps: int, learnt: float = 0.0, accepted: float = 0.5) -> StepSums:
    """Of so many steps, `learnt` (0 to 1) of the way from a loss of 2 to 1; `accepted` drafts a block."""
    one = torch.tensor(float(steps))
    slots = torch.tensor([0.0, 4.0, 4.0, 4.0]) * steps
    return StepSums(
        loss=(2 - learnt) * one,
        weight=one,
        cross_entropy=one,
        divergence=one,
        counts=slots,
        correct=slots / 2 * (1 + learnt),
        acceptance=4 * (1 + accepted * (1 + learnt)) * one,
        blocks=4 * one,
        nonfinite=0 * one,
    )


class Foretold:
    """What a warm-up measured, and what was spent."""

    def __init__(self, steps_per_second: float | None) -> None:
        self.steps_per_second = steps_per_second

    def metrics(self, _: object) -> dict[str, float]:
        return {"cost/spent_gpu_hours": 1.5, "cost/projected": 120.0}


class World:
    """A reporter with everything around it recorded."""

    def __init__(
        self,
        interval: float = 1e-6,
        checkpoint: Checkpoint | None = None,
        outlook: Foretold | None = None,
        cost_limit: float | None = None,
        dropped_share: float | None = None,
    ) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.saved: list[tuple[int, dict[str, float]]] = []
        self.stats = STATS
        self.earlier: list[dict[str, Any]] = []
        self.committed_at = time.monotonic()
        self.store_seconds = 0.1
        self.busy = False
        self.step, self.learnt, self.accepted = 0, 0.0, 0.5
        self.new: dict[str, float] = {}
        training = Training(batch_size=4, checkpoint=checkpoint or Checkpoint(every_steps=10_000))
        run = Run(
            training,
            steps=100,
            attempt=2,
            world=1,
            interval_seconds=interval,
            dropped_share=dropped_share,
            cost_limit=cost_limit,
        )
        self.reporter = Reporter(
            run,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda: self.stats,
            step=0,
            counts={},
            store_seconds=lambda: self.store_seconds,
            outlook=outlook,  # type: ignore[arg-type]
        )

    def take_steps(self, count: int, **counts: float) -> None:
        self.step += count
        self.new = {
            "samples": 4.0 * count,
            "tokens": 100.0 * count,
            "gradient_norm": 0.5 * count,
            **counts,
        }
        self._steps = count
        self.reporter.after_step(self)  # type: ignore[arg-type]

    # the trainer
    def read_totals(self) -> tuple[StepSums, dict[str, float]]:
        counts = {**dict.fromkeys((*COUNTS, "gradient_norm", "skipped", "weightless"), 0.0), **self.new}
        self.new = {}
        steps, self._steps = self._steps, 0
        return sums(steps, self.learnt, self.accepted), counts

    def settle(self) -> None: ...

    # the tracker
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def event(self, text: str) -> None:
        self.events.append(text)

    # the optimiser and the checkpoints
    def weights_on_host(self) -> dict[str, Any]:
        return {}

    moments_on_host = weights_on_host

    def check(self) -> None: ...

    def save(self, step: int, counts: Mapping[str, float], *_: Any) -> None:
        self.saved.append((step, dict(counts)))


def test_a_row_has_the_objective_the_schedule_and_both_sides() -> None:
    world = World()
    world.take_steps(3)
    (step, row) = world.rows[0]
    assert step == 3
    assert row["train/loss"] == 2.0
    assert row["train/accuracy"] == 0.5
    assert row["train/acceptance_length"] == 1.5
    assert row["train/streak"] == 0.5
    assert row["progress/share"] == 0.03
    assert row["target/idle_share"] == 0.4
    assert row["train/gradient_norm"] == 0.5
    assert {
        "train/learning_rate",
        "train/noise_std",
        "drafter/tokens_per_second",
        "channel/depth",
    } <= row.keys()
    progress = world.reporter.progress()
    assert (progress.done, progress.total, progress.attempt) == (3.0, 100.0, 2)
    assert progress.figures["targets"] == 1.0
    assert "bottleneck" in str(progress.figures["verdict"])
    assert progress.eta_seconds is not None
    progress.model_dump_json()


def test_between_intervals_nothing_is_read() -> None:
    world = World(interval=3600.0)
    world.take_steps(1)
    assert world.rows == []
    assert world.reporter.progress().done == 1.0


def test_checkpoints_are_due_by_steps_and_wait_for_an_upload_under_way() -> None:
    world = World(interval=3600.0, checkpoint=Checkpoint(every_steps=5))
    for _ in range(4):
        world.take_steps(1)
    assert world.saved == []
    world.busy = True
    world.take_steps(1)
    assert world.saved == []
    world.busy = False
    world.take_steps(1)
    assert [step for step, _ in world.saved] == [6]


def test_a_few_lost_samples_are_left_out_and_many_end_the_run_with_the_cause() -> None:
    world = World()
    world.take_steps(10, lost_samples=2.0)
    with pytest.raises(DflashError, match=r"hidden states of 5 samples, .*tap 1 is not finite \(12\)"):
        world.take_steps(10, lost_samples=3.0)


def test_steps_without_an_anchor_raise_one_alarm_beyond_a_percent() -> None:
    world = World()
    world.take_steps(99)
    world.take_steps(1, weightless=1.0)
    assert world.events == []
    world.take_steps(1, weightless=1.0)
    world.take_steps(1, weightless=1.0)
    assert len(world.events) == 1
    assert "of the steps have no anchor" in world.events[0]


def test_what_is_wrong_is_an_event_once_and_stays_in_the_heartbeat_while_it_lasts() -> None:
    world = World()
    world.stats = replace(STATS, targets=())
    world.take_steps(1)
    assert world.reporter.progress().alerts == []
    world.store_seconds = 12.0
    world.take_steps(1)
    world.take_steps(1)
    assert [text for text in world.events if "the store takes 12.0 s" in text] == world.events
    assert len(world.events) == 1
    assert world.reporter.progress().alerts == world.events
    world.store_seconds = 0.1
    for _ in range(12):
        world.take_steps(1)
    assert world.reporter.progress().alerts == []
    world.store_seconds = 12.0
    world.take_steps(1)
    assert len(world.events) == 2


def test_checkpoints_that_do_not_commit_are_told_by_how_often_they_should() -> None:
    world = World(checkpoint=Checkpoint(every_steps=10_000, every_minutes=0.01))
    world.take_steps(1)
    assert world.events == []
    world.committed_at -= 60.0  # late, but no more than an upload takes
    world.take_steps(1)
    assert world.events == []
    world.committed_at -= 120.0
    world.take_steps(1)
    assert len(world.events) == 1
    assert "the last checkpoint was committed 3 minutes ago" in world.events[0]


@pytest.mark.parametrize(("foretold", "late"), [(1e-3, False), (1e9, True), (None, False)])
def test_a_run_slower_than_its_warm_up_is_told_once_after_a_dozen_rows(
    foretold: float | None, late: bool
) -> None:
    world = World(outlook=Foretold(foretold))
    world.stats = replace(STATS, targets=())
    for _ in range(12):
        world.take_steps(1)
    assert world.events == []
    world.take_steps(1)
    world.take_steps(1)
    assert [text for text in world.events if "at the warm-up's rate" in text] == world.events
    assert len(world.events) == late


def test_what_was_spent_is_in_each_row() -> None:
    world = World(outlook=Foretold(None))
    world.take_steps(1)
    assert world.rows[0][1]["cost/spent_gpu_hours"] == 1.5


@pytest.mark.parametrize(("limit", "told"), [(100.0, 1), (200.0, 0), (None, 0)])
def test_a_run_that_will_cost_more_than_its_limit_says_so_once(limit: float | None, told: int) -> None:
    world = World(outlook=Foretold(None), cost_limit=limit)
    world.take_steps(1)
    world.take_steps(1)
    assert len(world.events) == told
    assert all("tracking.costLimit is 100.00" in text for text in world.events)


BUSY = replace(STATS, targets=(TargetStats("target-0", True, 3, 300, 10, 0.02),))
FAULTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "it learns nothing": ("the loss is not falling", "the accuracy is flat"),
    "nothing is accepted": ("the acceptance length stays at 1.0",),
    "gradients explode": ("the gradient's norm is",),
    "gradients are not finite": ("the gradient was not finite",),
    "targets idle": ("targets are idle",),
    "answers were dropped": ("of the answers are dropped",),
    "replies are bad": ("replies with hidden states were refused",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_whole_run_with_a_fault_raises_its_alerts_and_no_other(fault: str) -> None:
    world = World(dropped_share=0.5 if fault == "answers were dropped" else 0.02)
    for step in range(100):
        bad = step if fault == "replies are bad" else 0
        idle = STATS if fault == "targets idle" else BUSY
        world.stats = replace(idle, bad_replies=bad, delivered=4 * step)
        world.accepted = 0.0 if fault == "nothing is accepted" else 0.5
        world.learnt = 0.0 if fault == "it learns nothing" else step / 100
        norm = 50.0 if fault == "gradients explode" and step > 60 else 0.5
        skipped = 1.0 if fault == "gradients are not finite" and step % 10 == 5 else 0.0
        world.take_steps(1, gradient_norm=norm * (1 - skipped), skipped=skipped)
    assert len(world.events) == len(FAULTS[fault]), world.events
    for words in FAULTS[fault]:
        assert [text for text in world.events if words in text], world.events
