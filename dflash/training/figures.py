"""The sums that ranks add up each step, and what a person is shown of them. Pure but for the tensors.

One flat fp32 tail rides with the gradient in the step's only all-reduce: the objective's own sums
(`StepSums`), then the counts below. Everything is a sum, so it adds up over micro-batches, ranks and
the steps of an interval alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.objective.step import StepSums

COUNTS = (
    "samples",
    "tokens",
    "unanchored_samples",
    "coverage",
    "lost_samples",
    "wait_seconds",
    "stop",
    "end",
    "incomplete",
)
"""Beside `StepSums`, per rank and step: samples and context tokens trained, samples without an anchor,
each sample's share of supervised tokens that a block predicts, samples that no target could give states
for, seconds waited for states, whether this rank wants to stop, whether it wants the run to end here,
and whether it gave its part of the step up."""


@dataclass(frozen=True)
class SumsLayout:
    """Where everything is in the tail, for a block size."""

    block_size: int

    @property
    def objective(self) -> int:
        """Numbers of StepSums: two of them are per slot."""
        return 7 + 2 * self.block_size

    @property
    def size(self) -> int:
        """Numbers in all."""
        return self.objective + len(COUNTS)

    def step_sums(self, tail: Tensor) -> StepSums:
        """The objective's part."""
        return StepSums.unflatten(tail[: self.objective], self.block_size)

    def count(self, tail: Tensor, name: str) -> Tensor:
        """One count, as a view."""
        return tail[self.objective + COUNTS.index(name)]


def objective_metrics(sums: StepSums) -> dict[str, float]:
    """What an interval's steps achieved. `sums` are on the host; empty when no block was trained."""
    weight, blocks = float(sums.weight), float(sums.blocks)
    if weight <= 0.0 or blocks <= 0.0:
        return {}
    counts, correct = sums.counts.double(), sums.correct.double()
    metrics = {
        "train/loss": float(sums.loss) / weight,
        "train/cross_entropy": float(sums.cross_entropy) / weight,
        "train/divergence": float(sums.divergence) / weight,
        "train/accuracy": float(correct.sum() / counts.sum().clamp(min=1)),
        # Of the draft's own argmax against the data, bonus included: comparable with serving's figure.
        "train/acceptance_length": float(sums.acceptance) / blocks,
        "train/streak": float(sums.acceptance) / blocks - 1.0,
    }
    for slot in torch.nonzero(counts).flatten().tolist():
        metrics[f"train/accuracy_slot_{slot}"] = float(correct[slot] / counts[slot])
    return metrics
