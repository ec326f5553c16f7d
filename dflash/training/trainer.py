"""The training loop of one rank: samples to gradients to one all-reduce to one update, step after step.

All ranks take every step together, also those that have nothing to train in it. What must be
agreed on rides in the step's all-reduce: a rank that is asked to stop gives up what it is doing and
joins with a flag, so the group stops at one step boundary, whoever was told and whoever was waiting.
A step that any rank gave up, or that is not finite, changes nothing.

On a GPU nothing waits for the device within a step: what a step decided is read while the next one
computes, and figures are read in one transfer an interval.

Not for: where samples come from (`feed`), what a step computes (`dflash.objective`), or what
happens around the loop (`run`).
"""

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.errors import DflashError
from dflash.model.drafter import DFlashDrafter
from dflash.model.target import Tables
from dflash.objective.batch import Sample, pack
from dflash.objective.step import StepSums, block_step
from dflash.objective.weights import Objective
from dflash.resource.training import Training
from dflash.training.feed import Feed, Interrupted
from dflash.training.figures import COUNTS, SumsLayout
from dflash.training.group import Group
from dflash.training.optimizer import FlatOptimizer
from dflash.training.order import Order
from dflash.training.schedule import learning_rate, noise_std

log = logging.getLogger(__name__)

MAX_SKIPPED = 10
"""Steps in a row that are not finite before training stops: then it will not recover by itself."""


class Outcome(enum.Enum):
    """How the loop ended."""

    DONE = enum.auto()
    STOPPED = enum.auto()


@dataclass(frozen=True)
class Learner:
    """What is trained, and by what measure."""

    drafter: DFlashDrafter
    tables: Tables
    objective: Objective
    optimizer: FlatOptimizer
    device: torch.device


@dataclass(frozen=True)
class Decision:
    """What the group agreed on in a step's all-reduce."""

    stop: bool
    end: bool
    incomplete: bool
    skipped: bool
    weight: float


class Trainer:
    """Trains from a step on. `step` is the number of steps done, and so the next one's number."""

    def __init__(
        self,
        training: Training,
        learner: Learner,
        group: Group,
        order: Order,
        feed: Feed,
        *,
        step: int,
        stop: Callable[[], bool],
        end: Callable[[], bool],
        after_step: Callable[["Trainer"], None],
    ) -> None:
        """`stop` says whether this process was asked to end; `after_step` is called at every boundary.

        `end` says whether the run is to end before its last step; one rank that says so is enough.
        """
        self.step = step
        self._training, self._learner, self._group = training, learner, group
        self._order, self._feed = order, feed
        self._stop, self._end, self._after_step = stop, end, after_step
        self._sums = SumsLayout(learner.drafter.shape.block_size)
        self._totals = torch.zeros(self._sums.size + 3, dtype=torch.float64, device=learner.device)
        self._undecided: _Reading | None = None
        self._skipped_in_a_row = 0
        self._stopped = False
        self._ended = False
        self._waited = 0.0

    def run(self) -> Outcome:
        """Train to the end of the run, or until the group stops. Errors: the feed's, the group's."""
        while self.step < self._order.steps and not self._over:
            self._take_step()
            if not self._over:
                self._after_step(self)
        self.settle()
        return Outcome.STOPPED if self.stopped else Outcome.DONE

    @property
    def _over(self) -> bool:
        return self._stopped or self._ended

    @property
    def stopped(self) -> bool:
        """Whether the group has agreed to stop."""
        return self._stopped

    def read_totals(self) -> tuple[StepSums, dict[str, float]]:
        """Sums of all steps since the last call, over all ranks; one transfer.

        Counts also have `skipped` (steps that were not finite), `weightless` (without any anchor) and
        `gradient_norm` (of all other steps, before clipping).
        """
        totals = self._totals.to("cpu", copy=True)
        self._totals.zero_()
        counts = {name: float(self._sums.count(totals, name)) for name in COUNTS}
        names = ("gradient_norm", "skipped", "weightless")
        counts |= dict(zip(names, totals[-3:].tolist(), strict=True))
        return self._sums.step_sums(totals[: self._sums.size]), counts

    def _take_step(self) -> None:
        optimizer = self._learner.optimizer
        optimizer.zero()
        began = time.perf_counter()
        try:
            self._accumulate()
        except Interrupted:
            self._sums.count(optimizer.sums, "incomplete").fill_(1.0)
        computed = time.perf_counter()
        self.settle()
        if self._over:
            return
        self._count("stop", float(self._stop()))
        self._count("end", float(self._end()))
        waited = self._feed.wait_seconds
        self._count("wait_seconds", waited - self._waited)
        self._group.sum(optimizer.reduced)
        reduced = time.perf_counter()
        rate = learning_rate(self._training, self.step, self._order.steps)
        sums = self._sums.step_sums(optimizer.sums)
        incomplete = self._sums.count(optimizer.sums, "incomplete")
        norm, skipped = optimizer.step(rate, sums.weight, refused=sums.nonfinite + incomplete)
        self._add_totals(optimizer.sums, norm, skipped, incomplete)
        stop, end = (self._sums.count(optimizer.sums, name) for name in ("stop", "end"))
        self._undecided = _Reading(torch.stack([stop, end, incomplete, skipped, sums.weight]))
        self.step += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "step %d: %.3f s computing, %.3f s of it waiting; %.3f s reducing, %.3f s updating",
                self.step,
                computed - began,
                waited - self._waited,
                reduced - computed,
                time.perf_counter() - reduced,
            )
        self._waited = waited
        if self._learner.device.type == "cpu":
            self.settle()

    def _accumulate(self) -> None:
        """Forward and backward of this rank's part of the step, in micro-batches of so many tokens."""
        pending: list[Sample] = []
        tokens = 0
        places = self._order.step(self.step, self._group.rank, self._group.world)
        for place in places:
            fed = self._feed.take(self._interrupted)
            if (sample := fed.sample) is None:
                self._count("lost_samples", 1)
                log.error("not trained: %s", fed.fault)
                continue
            if pending and tokens + len(sample.ids) > self._training.micro_batch_tokens:
                self._train(pending, place.epoch)
                pending, tokens = [], 0
            pending.append(sample)
            tokens += len(sample.ids)
        if pending:
            self._train(pending, places[0].epoch)

    def _train(self, samples: list[Sample], epoch: int) -> None:
        learner = self._learner
        batch = pack(
            samples,
            learner.drafter.shape,
            anchors=self._training.anchors,
            seed=self._training.seed,
            epoch=epoch,
            device=learner.device,
        )
        sums = block_step(
            learner.drafter,
            learner.tables,
            batch,
            learner.objective,
            noise_std=noise_std(self._training, self.step, self._order.steps),
        )
        learner.optimizer.sums[: self._sums.objective] += sums.flatten()
        self._count("samples", len(samples))
        self._count("tokens", sum(len(sample.ids) for sample in samples))
        self._count("unanchored_samples", batch.samples - batch.anchored_samples)
        self._count("coverage", batch.coverage)

    def _count(self, name: str, amount: float) -> None:
        self._sums.count(self._learner.optimizer.sums, name).add_(amount)

    def _interrupted(self) -> bool:
        """Whether to give up waiting: this rank or another was asked to end, or the group has agreed to."""
        if self._undecided is not None and self._undecided.ready:
            self.settle()
        if self._stop():
            self._group.announce_stop()
            return True
        return self._over or self._group.stopping

    def settle(self) -> None:
        """Learn what the last step decided, so that `step` is certain: one that was given up is not done."""
        if self._undecided is None:
            return
        decision, self._undecided = self._undecided.read(), None
        if decision.incomplete:
            self.step -= 1
        self._stopped = decision.stop or decision.incomplete
        self._ended = decision.end and not decision.incomplete
        if decision.skipped and not decision.incomplete and decision.weight != 0.0:
            self._skipped_in_a_row += 1
            log.warning(
                "step %d is not finite and was skipped (%d in a row)", self.step, self._skipped_in_a_row
            )
            if self._skipped_in_a_row >= MAX_SKIPPED:
                raise DflashError(
                    f"{MAX_SKIPPED} steps in a row, up to step {self.step}, had a loss or a gradient that is "
                    "not finite; the last checkpoint is good: lower training.learningRate or training.clip"
                )
        else:
            self._skipped_in_a_row = 0

    def _add_totals(self, sums: Tensor, norm: Tensor, skipped: Tensor, incomplete: Tensor) -> None:
        """A skipped step counts in samples and tokens, not in what was achieved; one given up in nothing."""
        done = incomplete == 0
        end = self._sums.objective
        weightless = (self._sums.step_sums(sums).weight == 0) & done
        self._totals[:end] += torch.where(skipped > 0, 0.0, sums[:end])
        self._totals[end:-3] += torch.where(done, sums[end:], 0.0)
        self._totals[-3] += torch.where(skipped > 0, 0.0, norm)
        self._totals[-2] += (skipped > 0) & done & ~weightless
        self._totals[-1] += weightless


class _Reading:
    """A decision on its way from the device; `read` waits for it."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = values

    @property
    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Decision:
        if self._event is not None:
            self._event.synchronize()
        stop, end, incomplete, skipped, weight = self._values.tolist()
        return Decision(stop > 0, end > 0, incomplete > 0, skipped > 0, weight)
