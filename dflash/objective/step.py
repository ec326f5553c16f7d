"""One forward and backward of the drafter on a packed batch.

Gradients are ADDED to `.grad` without normalising: the loss is sum(w L) / sum(w) over the whole
optimiser step, all ranks and all accumulated batches, and a weight may depend on the drafter's own
output, so the caller sums gradients and `StepSums.weight` first and scales once by 1 / sum(w).

Nothing here waits for the device: every figure stays in a tensor until the caller reads them all.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from dflash.model.drafter import DFlashDrafter
from dflash.model.target import Tables
from dflash.objective.batch import PackedBatch
from dflash.objective.head_loss import (
    Chunk,
    Correction,
    RowLosses,
    Teacher,
    Weigh,
    default_chunk_rows,
    head_loss,
    plan_chunks,
)
from dflash.objective.weights import Objective, slot_weights


@dataclass(frozen=True)
class StepSums:
    """Sums over a batch, fp32 on its device; they add up over batches and ranks.

    loss: sum of w L; weight: sum of w; so loss / weight is the loss. cross_entropy and divergence: sums
    of w times each part. counts, correct: [B], supervised slots by slot and how many of them the
    draft's argmax got right. acceptance: over blocks, 1 + the length of the correct prefix, the
    simulated acceptance length. blocks: how many. nonfinite: above 0 when the loss or its gradient is
    not finite; then the gradients in `.grad` are unusable and the step must be skipped.
    """

    loss: Tensor
    weight: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    counts: Tensor
    correct: Tensor
    acceptance: Tensor
    blocks: Tensor
    nonfinite: Tensor

    def __add__(self, other: "StepSums") -> "StepSums":
        """Add up field by field."""
        return StepSums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def flatten(self) -> Tensor:
        """Everything in one fp32 vector, for one transfer or one all-reduce."""
        return torch.cat([getattr(self, f.name).reshape(-1) for f in fields(self)])

    @classmethod
    def unflatten(cls, vector: Tensor, block_size: int) -> "StepSums":
        """The inverse of `flatten`."""
        sizes = [block_size if f.name in ("counts", "correct") else 1 for f in fields(cls)]
        parts = torch.split(vector, sizes)
        return cls(
            **{
                f.name: part if size > 1 else part[0]
                for f, part, size in zip(fields(cls), parts, sizes, strict=True)
            }
        )


def block_step(
    drafter: DFlashDrafter,
    tables: Tables,
    batch: PackedBatch,
    objective: Objective,
    *,
    noise_std: float = 0.0,
) -> StepSums:
    """Forward and unnormalised backward of one batch; computes in the dtype of `tables`.

    noise_std: std of Gaussian noise on each tap, relative to its RMS at that token; drawn from the
    batch's per-sample seeds, so it does not depend on how samples are put together.
    """
    taps = batch.taps
    if noise_std > 0:
        taps = with_noise(taps, noise_std, batch.noise_seeds, batch.context_lengths, len(drafter.shape.taps))
    inputs = functional.embedding(batch.tokens.flatten(), tables.embedding)
    states = drafter(taps, inputs, batch.layout)
    hidden = states.index_select(0, batch.rows)
    correction = _correction(drafter, tables, batch, states)
    losses = row_losses(hidden, tables, batch, objective, drafter.shape.block_size, correction=correction)
    outputs, gradients = [hidden], [losses.gradient]
    if correction is not None and losses.features_gradient is not None and losses.table_gradient is not None:
        outputs += correction
        gradients += [losses.features_gradient, losses.table_gradient.to(correction[1].dtype)]
    torch.autograd.backward(outputs, gradients)
    return _sums(losses, batch, objective, drafter.shape.block_size)


def row_losses(
    hidden: Tensor,
    tables: Tables,
    batch: PackedBatch,
    objective: Objective,
    block_size: int,
    *,
    correction: tuple[Tensor, Tensor] | None = None,
) -> RowLosses:
    """Losses, weights and weighted gradients of a batch's supervised slots, hidden [R, D]."""
    chunks = plan_chunks(
        batch.rows_host, batch.teacher_rows_host, block_size, default_chunk_rows(tables.head)
    )
    teacher = None
    if batch.teacher is not None:
        teacher = Teacher(batch.teacher.to(hidden.dtype), batch.teacher_rows)
    return head_loss(
        hidden.detach(),
        tables.head,
        batch.labels,
        chunks,
        _weigher(batch, objective, block_size),
        teacher=teacher,
        kl_weight=objective.kl_weight,
        temperature=objective.kl_temperature,
        correction=None if correction is None else Correction(*(part.detach() for part in correction)),
    )


def _correction(
    drafter: DFlashDrafter, tables: Tables, batch: PackedBatch, states: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The head's features [R, r] of the supervised slots and its table [V, r], or None.

    Blocks are teacher-forced: a slot's predecessors are the true tokens.
    """
    true = batch.tokens.flatten().index_copy(0, batch.rows, batch.labels)
    previous = functional.embedding(true, tables.embedding).view(*batch.tokens.shape, -1)
    corrected = drafter.correction(states.view_as(previous), previous)
    if corrected is None:
        return None
    features, table = corrected
    return features.flatten(0, 1).index_select(0, batch.rows), table.to(features.dtype)


def with_noise(
    taps: Tensor, std: float, seeds: tuple[int, ...], lengths: tuple[int, ...], count: int
) -> Tensor:
    """taps [S, K*D] plus Gaussian noise of `std` times each tap's RMS at each token; one seed a sample."""
    noisy = []
    for part, seed in zip(torch.split(taps[: sum(lengths)], list(lengths)), seeds, strict=True):
        generator = torch.Generator(taps.device).manual_seed(seed)
        noise = torch.randn(part.shape, generator=generator, device=taps.device)
        split = part.float().view(len(part), count, part.shape[1] // count)
        rms = split.square().mean(2, keepdim=True).sqrt()
        noisy.append(split.addcmul(noise.view_as(split), rms, value=std).flatten(1).to(taps.dtype))
    return torch.cat([*noisy, taps[sum(lengths) :]])


def _weigher(batch: PackedBatch, objective: Objective, size: int) -> Weigh:
    """Weights of a chunk's rows, from its blocks laid out as [blocks, B]."""

    def weigh(chunk: Chunk, correct: Tensor, probability: Tensor) -> Tensor:
        rows = batch.rows[chunk.low : chunk.high] - chunk.first * size
        slots = (chunk.last - chunk.first) * size

        def grid(values: Tensor) -> Tensor:
            return values.new_zeros(slots).index_copy_(0, rows, values).view(-1, size)

        valid = grid(torch.ones_like(correct))
        return slot_weights(objective, valid, grid(correct), grid(probability)).flatten()[rows]

    return weigh


def _sums(losses: RowLosses, batch: PackedBatch, objective: Objective, size: int) -> StepSums:
    weight = losses.weight
    cross_entropy = (weight * losses.cross_entropy).sum()
    divergence = (weight * losses.divergence).sum()
    scale = objective.kl_weight * objective.kl_temperature**2
    loss = scale * divergence + (1 - objective.kl_weight) * cross_entropy
    slots = weight.new_zeros(2, batch.tokens.numel())
    slots[0].index_fill_(0, batch.rows, 1.0)
    slots[1].index_copy_(0, batch.rows, losses.correct.float())
    valid, correct = slots.view(2, -1, size)
    blocks = torch.full((), float(batch.blocks), device=weight.device)
    finite = torch.isfinite(loss) & torch.isfinite(losses.gradient.sum(dtype=torch.float32))
    return StepSums(
        loss=loss,
        weight=weight.sum(),
        cross_entropy=cross_entropy,
        divergence=divergence,
        counts=valid.sum(0),
        correct=correct.sum(0),
        acceptance=correct[:, 1:].cumprod(1).sum() + blocks,
        blocks=blocks,
        nonfinite=(~finite).float(),
    )
