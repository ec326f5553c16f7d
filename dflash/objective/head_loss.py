"""The frozen head and the loss in one pass, in chunks of blocks, so that logits never exist in full.

For each chunk: logits = hidden @ head^T; softmax; the gradient with respect to the logits is written
over the probabilities; its product with the head is the gradient with respect to hidden. The head is
frozen, so there is no gradient of it. Chunks hold whole blocks, for a slot's weight may depend on the
slots before it; the weight multiplies the row's gradient once it is D wide.

The teacher's distribution depends on the position alone, and blocks of one document overlap, so a
chunk computes each position's distribution once. Products and stored logits are in the dtype of
`hidden`; the statistics of a softmax are fp32 inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.objective.fused_rows import Rows, compiled

_CPU_CHUNK_BYTES = 16 << 20
"""One buffer of logits on a CPU: about what its last-level cache holds."""
_GPU_CHUNK_BYTES = 512 << 20
_LEAST_ROWS = 128
"""Fewer rows than this make the products inefficient."""
_TILE = 512
"""Columns reduced at a time: see `_first_maximum` and `_row_sum`."""


class Chunk(NamedTuple):
    """Rows [low, high) that belong to blocks [first, last) and learn from teacher lines [top, end)."""

    low: int
    high: int
    first: int
    last: int
    top: int
    end: int


@dataclass(frozen=True)
class Teacher:
    """The target's final states [U, D], and each row's line of them, int64 [R]."""

    states: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Correction:
    """A low-rank addition to the logits: features [R, r] @ table^T, with table [V, r] trainable."""

    features: Tensor
    table: Tensor


@dataclass(frozen=True)
class RowLosses:
    """Of R rows: losses fp32 [R] without weights; weights fp32 [R]; weighted gradients.

    cross_entropy and divergence are the two parts (zeros where there is no teacher); probability is
    the draft's of the label at temperature 1; correct, whether its argmax is the label. gradient [R, D]
    is of the sum of weight * (kl_weight T^2 divergence + (1 - kl_weight) cross_entropy).
    """

    cross_entropy: Tensor
    divergence: Tensor
    probability: Tensor
    correct: Tensor
    weight: Tensor
    gradient: Tensor
    features_gradient: Tensor | None
    table_gradient: Tensor | None


Weigh = Callable[[Chunk, Tensor, Tensor], Tensor]
"""From a chunk, its rows' `correct` (bool [r]) and `probability` (fp32 [r]) to their weights, fp32 [r]."""


def plan_chunks(
    rows: np.ndarray, teacher_rows: np.ndarray, block_size: int, rows_per_chunk: int
) -> list[Chunk]:
    """Cut rows (ascending flat slots) at block borders into chunks of about `rows_per_chunk` rows."""
    blocks = rows // block_size
    chunks, low = [], 0
    while low < len(rows):
        high = min(low + rows_per_chunk, len(rows))
        if high < len(rows):
            border = int(np.searchsorted(blocks, blocks[high]))
            high = border if border > low else int(np.searchsorted(blocks, blocks[high], side="right"))
        lines = teacher_rows[low:high]
        chunks.append(
            Chunk(
                low, high, int(blocks[low]), int(blocks[high - 1]) + 1, int(lines.min()), int(lines.max()) + 1
            )
        )
        low = high
    return chunks


def default_chunk_rows(head: Tensor) -> int:
    """Rows whose logits fill the device's chunk, at least enough for efficient products."""
    budget = _GPU_CHUNK_BYTES if head.is_cuda else _CPU_CHUNK_BYTES
    return max(_LEAST_ROWS, budget // (head.shape[0] * head.element_size()))


@torch.no_grad()
def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    chunks: list[Chunk],
    weigh: Weigh,
    *,
    teacher: Teacher | None = None,
    kl_weight: float = 0.0,
    temperature: float = 1.0,
    correction: Correction | None = None,
) -> RowLosses:
    """Losses and gradients of R rows. hidden [R, D], head [V, D] of one dtype; labels int64 [R].

    kl_weight above 0 needs a teacher. Extra memory: four buffers of a chunk's rows by V.
    """
    rows = len(hidden)
    if kl_weight > 0 and teacher is None:
        raise ValueError("kl_weight is above 0 but the states have no final hidden state; ask targets for it")
    cross_entropy, divergence, probability, weight = hidden.new_zeros(4, rows, dtype=torch.float32)
    correct = torch.zeros(rows, device=hidden.device, dtype=torch.bool)
    gradient = torch.empty_like(hidden)
    features_gradient = table_gradient = None
    if correction is not None:
        features_gradient = torch.empty_like(correction.features)
        table_gradient = torch.zeros_like(correction.table, dtype=torch.float32)
    scratch = _Scratch(max((c.high - c.low for c in chunks), default=0), head)
    rows_of = compiled() if head.is_cuda else None
    for chunk in chunks:
        part = slice(chunk.low, chunk.high)
        logits = torch.mm(hidden[part], head.t(), out=scratch.take("logits", chunk.high - chunk.low))
        if correction is not None:
            logits.addmm_(correction.features[part], correction.table.t())
        lines = None
        if teacher is not None and kl_weight > 0:
            lines = teacher.states[chunk.top : chunk.end], teacher.rows[part] - chunk.top
        label = labels[part]
        if rows_of is not None:
            taught, line = (None, None) if lines is None else (lines[0] @ head.t(), lines[1])
            found = rows_of(logits, label, taught, line, kl_weight=kl_weight, temperature=temperature)
        else:
            found = _tiled_rows(
                logits, label, lines, head, kl_weight=kl_weight, temperature=temperature, scratch=scratch
            )
        correct[part] = found.winner == label
        cross_entropy[part] = found.cross_entropy
        probability[part] = found.probability
        divergence[part] = found.divergence
        weight[part] = weigh(chunk, correct[part], probability[part])
        torch.mm(found.gradient, head, out=gradient[part])
        if correction is not None and features_gradient is not None and table_gradient is not None:
            torch.mm(found.gradient, correction.table, out=features_gradient[part])
            weighted = correction.features[part] * weight[part, None].to(hidden.dtype)
            table_gradient += found.gradient.t() @ weighted
    gradient.mul_(weight[:, None])
    if features_gradient is not None:
        features_gradient.mul_(weight[:, None])
    return RowLosses(
        cross_entropy, divergence, probability, correct, weight, gradient, features_gradient, table_gradient
    )


def _tiled_rows(
    logits: Tensor,
    labels: Tensor,
    lines: tuple[Tensor, Tensor] | None,
    head: Tensor,
    *,
    kl_weight: float,
    temperature: float,
    scratch: "_Scratch",
) -> Rows:
    """`fused_rows.rows_of` for a CPU, with the teacher's product: tiled reductions, buffers used again."""
    top, winner = _first_maximum(logits)
    label_logit = logits.gather(1, labels[:, None]).squeeze(1).float()
    grad = torch.softmax(logits, 1, out=scratch.take("gradient", len(logits)))
    normaliser = _normaliser(grad, top, winner)
    divergence = torch.zeros_like(normaliser)
    if lines is not None:
        draft = (top, winner, normaliser)
        divergence = _blend(
            grad, logits, draft, lines, head, kl_weight=kl_weight, temperature=temperature, scratch=scratch
        )
    # By flat index: scatter_add_ copies the whole buffer, 3 % of a step.
    flat = torch.arange(len(grad), device=grad.device) * grad.shape[1] + labels
    grad.view(-1).index_add_(0, flat, grad.new_full(flat.shape, kl_weight - 1.0))
    probability = torch.exp(label_logit - normaliser)
    return Rows(grad, winner, normaliser - label_logit, probability, divergence)


class _Scratch:
    """[rows, V] buffers, made when first asked for and used again in every chunk."""

    def __init__(self, rows: int, head: Tensor) -> None:
        self._rows, self._head = rows, head
        self._made: dict[str, Tensor] = {}

    def take(self, name: str, rows: int) -> Tensor:
        """The named buffer's first `rows` rows; its content is whatever was there."""
        if name not in self._made or len(self._made[name]) < rows:
            self._made[name] = self._head.new_empty(max(rows, self._rows), self._head.shape[0])
        return self._made[name][:rows]


def _first_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum, fp32 [r], and the first index that has it, as a greedy decoder picks it.

    The row is read once for the maxima of tiles, and then only the best tile for the index.
    """
    width = logits.shape[1]
    if width < 4 * _TILE:
        top, winner = logits.max(1)
        return top.float(), winner
    whole = width - width % _TILE
    tiles = _tiles(logits)
    top, tile = tiles.amax(2).max(1)
    best = tiles.gather(1, tile[:, None, None].expand(-1, 1, _TILE)).squeeze(1)
    winner = tile * _TILE + best.max(1).indices
    if whole < width:
        last, last_winner = logits[:, whole:].max(1)
        winner = torch.where(last > top, last_winner + whole, winner)
        top = torch.maximum(top, last)
    return top.float(), winner


def _tiles(values: Tensor) -> Tensor:
    """[r, V] seen as [r, V // _TILE, _TILE]; columns beyond the last whole tile are left out."""
    count = values.shape[1] // _TILE
    return values[:, : count * _TILE].view(len(values), count, _TILE)


def _normaliser(probabilities: Tensor, top: Tensor, winner: Tensor) -> Tensor:
    """log sum exp of the logits, fp32 [r]: the largest logit less the log of its probability."""
    return top - probabilities.gather(1, winner[:, None]).squeeze(1).float().log()


def _row_sum(values: Tensor) -> Tensor:
    """Sum of each row, fp32 [r]; partial sums of tiles first, which is fast in bf16 and loses little."""
    width = values.shape[1]
    whole = width - width % _TILE
    total = _tiles(values).sum(2).sum(1, dtype=torch.float32)
    if whole < width:
        total += values[:, whole:].sum(1, dtype=torch.float32)
    return total


def _blend(
    grad: Tensor,
    logits: Tensor,
    draft: tuple[Tensor, Tensor, Tensor],
    lines: tuple[Tensor, Tensor],
    head: Tensor,
    *,
    kl_weight: float,
    temperature: float,
    scratch: _Scratch,
) -> Tensor:
    """Turn the draft's probabilities in `grad` into the blended gradient, all but the label's part.

    With p and q the draft's and the target's distributions, p_T and q_T those at temperature T, the
    gradient of kl_weight T^2 KL(q_T || p_T) + (1 - kl_weight) CE with respect to the logits is
    kl_weight T (p_T - q_T) + (1 - kl_weight) (p - onehot). Overwrites logits. Gives KL, fp32 [r].
    """
    top, winner, normaliser = draft
    states, line = lines
    teacher = torch.mm(states, head.t(), out=scratch.take("teacher", len(states)))
    if temperature != 1.0:
        teacher.mul_(1.0 / temperature)
    target = torch.softmax(
        teacher, 1, out=scratch.take("target", max(len(states), len(logits)))[: len(states)]
    )
    teacher_normaliser = _normaliser(target, *_first_maximum(teacher))
    negative_entropy = _row_sum(teacher.mul_(target)) - teacher_normaliser
    of_rows = torch.index_select(target, 0, line, out=scratch.take("teacher", len(logits)))
    if temperature == 1.0:
        grad.sub_(of_rows, alpha=kl_weight)
    else:
        softened = torch.softmax(logits.mul_(1.0 / temperature), 1, out=scratch.take("target", len(logits)))
        normaliser = _normaliser(softened, top / temperature, winner)
        grad.mul_(1 - kl_weight).add_(softened.sub_(of_rows), alpha=kl_weight * temperature)
    return negative_entropy[line] - _row_sum(logits.mul_(of_rows)) + normaliser
