"""Packs samples into the tensors of one step: context, blocks, labels, and what each row needs.

Everything with a data-dependent size is decided here, on the CPU, from ids and masks that are
there anyway; the step itself then never waits for a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.errors import DflashError
from dflash.model.mask import BlockLayout, Tile, pad_to_bucket, plan_tiles
from dflash.model.shape import DraftShape
from dflash.model.states import States
from dflash.objective.anchors import draw_anchors, seed_of


@dataclass(frozen=True)
class Sample:
    """One conversation with its hidden states.

    ids: int64 [T] on the CPU. supervised: bool [T] on the CPU, true for tokens the target produced.
    """

    sample_id: str
    ids: Tensor
    supervised: Tensor
    states: States


@dataclass(frozen=True)
class PackedBatch:
    """Samples side by side. S context tokens, N blocks of B slots, R supervised slots, U teacher rows.

    taps: [S, K*D]; each sample's context ends before its last anchor, for nothing behind it is seen.
    layout: positions, documents and anchors: all that visibility depends on.
    tokens: int64 [N, B], the block inputs: the anchor's token, then mask tokens.
    rows: int64 [R], flat indexes (block * B + slot) of the supervised slots, ascending.
    labels: int64 [R], the token each row must predict.
    teacher: [U, D] or None, the target's final states at the positions a + k - 1 in use, each once.
    teacher_rows: int64 [R], each row's line of `teacher`.
    rows_host, teacher_rows_host: the same in NumPy, to cut the work without asking a device.
    noise_seeds, context_lengths: one per sample.
    blocks, anchored_samples: host counts, for logs: real blocks, and samples that have one.
    coverage: sum over samples of the share of their supervised tokens that some block must predict.
    """

    taps: Tensor
    layout: BlockLayout
    tokens: Tensor
    rows: Tensor
    labels: Tensor
    teacher: Tensor | None
    teacher_rows: Tensor
    rows_host: np.ndarray
    teacher_rows_host: np.ndarray
    noise_seeds: tuple[int, ...]
    context_lengths: tuple[int, ...]
    blocks: int
    samples: int
    anchored_samples: int
    coverage: float


def pack(
    samples: Sequence[Sample],
    shape: DraftShape,
    *,
    anchors: int,
    seed: int,
    epoch: int,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Draw each sample's anchors (at most `anchors`) and pack all samples into one batch.

    A batch without any anchor becomes one padding block: a forward and backward of true zeros, so
    that no rank skips a collective. On a GPU, S and N are padded to a few buckets (no recompiling).
    """
    size = shape.block_size
    offsets = np.arange(size)
    taps, finals, contexts, seeds = [], [], [], []
    documents, starts, tokens, labels, rows, teacher_positions = [], [], [], [], [], []
    block_count = final_rows = anchored = 0
    coverage = 0.0
    for index, sample in enumerate(samples):
        length = len(sample.ids)
        if len(sample.supervised) != length or len(sample.states.taps) != length:
            raise DflashError(
                f"sample {sample.sample_id}: {length} ids, {len(sample.supervised)} supervision marks and "
                f"{len(sample.states.taps)} states; they must be equally many, so this reply is unusable"
            )
        drawn = draw_anchors(sample.supervised, anchors, seed, epoch, sample.sample_id).numpy()
        context = int(drawn[-1]) if len(drawn) else 0
        anchored += len(drawn) > 0
        contexts.append(context)
        seeds.append(seed_of("noise", seed, epoch, sample.sample_id))
        taps.append(sample.states.taps[:context])
        ids, supervised = sample.ids.numpy(), sample.supervised.numpy()
        block = np.full((len(drawn), size), shape.mask_token_id, dtype=np.int64)
        block[:, 0] = ids[drawn]
        tokens.append(block)
        documents.append(np.full(len(drawn), index, dtype=np.int64))
        starts.append(drawn)
        positions = drawn[:, None] + offsets
        inside = np.minimum(positions, length - 1)
        valid = (positions < length) & supervised[inside]
        valid[:, 0] = False
        flat = np.flatnonzero(valid)
        rows.append(flat + block_count * size)
        labels.append(ids[inside].reshape(-1)[flat])
        used, lines = np.unique(positions.reshape(-1)[flat] - 1, return_inverse=True)
        teacher_positions.append(lines.reshape(-1) + final_rows)
        if sample.states.final is not None:
            finals.append(sample.states.final[torch.from_numpy(used).to(sample.states.final.device)])
        final_rows += len(used)
        coverage += len(used) / max(1, int(supervised.sum()))
        block_count += len(drawn)

    if not samples:
        raise ValueError("a batch needs at least one sample")
    all_rows, lines = np.concatenate(rows), np.concatenate(teacher_positions)
    on_gpu = torch.device(device).type == "cuda"
    padded_blocks = pad_to_bucket(max(block_count, 1), size) if on_gpu else max(block_count, 1)
    padded_context = pad_to_bucket(sum(contexts), 1) if on_gpu else sum(contexts)
    block_tokens = np.full((padded_blocks, size), shape.mask_token_id, dtype=np.int64)
    block_tokens[:block_count] = np.concatenate(tokens)
    block_document = np.full(padded_blocks, BlockLayout.PADDING_BLOCK, dtype=np.int64)
    block_document[:block_count] = np.concatenate(documents)
    block_anchor = np.zeros(padded_blocks, dtype=np.int64)
    block_anchor[:block_count] = np.concatenate(starts)

    def there(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor

    lengths = torch.tensor(contexts, dtype=torch.int64)
    padding = padded_context - sum(contexts)
    context_document = torch.repeat_interleave(torch.arange(len(contexts)), lengths).numpy()
    context_position = np.concatenate([np.arange(n) for n in contexts])
    joined = torch.cat(taps)
    joined = joined.to(device, non_blocking=True)
    if padding:
        joined = torch.cat([joined, joined.new_zeros(padding, shape.tap_width)])
    tiles: tuple[Tile, ...] = ()
    if not on_gpu:
        tiles = plan_tiles(block_document[:block_count], block_anchor[:block_count], contexts, shape)
    layout = BlockLayout(
        context_document=there(
            np.pad(context_document, (0, padding), constant_values=BlockLayout.PADDING_CONTEXT)
        ),
        context_position=there(np.pad(context_position.astype(np.int64), (0, padding))),
        block_document=there(block_document),
        block_anchor=there(block_anchor),
        block_size=size,
        tiles=tiles,
    )
    teacher = torch.cat(finals).to(device, non_blocking=True) if len(finals) == len(samples) else None
    return PackedBatch(
        taps=joined,
        layout=layout,
        tokens=there(block_tokens),
        rows=there(all_rows),
        labels=there(np.concatenate(labels)),
        teacher=teacher,
        teacher_rows=there(lines),
        rows_host=all_rows,
        teacher_rows_host=lines,
        noise_seeds=tuple(seeds),
        context_lengths=tuple(contexts),
        blocks=block_count,
        samples=len(samples),
        anchored_samples=anchored,
        coverage=coverage,
    )
