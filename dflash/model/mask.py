"""What a draft slot may see, said once, and three ways to attend by it.

Keys are the S context tokens followed by the N*B draft slots. A slot of the block anchored at a
sees, in its own document, context j with j < a (the target's state at a does not exist yet when
serving), and the slots of its own block, known by block index. Sliding layers look back at most
`window` positions, j >= a + offset - (window - 1), and are causal inside the block; full layers see
the block both ways: what the serving engines do. Padding sees nothing and is seen by nothing.

`visible` is that sentence as code. On a GPU it becomes a FlexAttention block mask; a dense mask
serves tests and devices without one; on a CPU, tiles of neighbouring blocks attend only to the
slice of context they can see. All three are built once a step and shared by layers of a kind.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash.model.shape import DraftShape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_TILE_SLOTS = 256
"""Query slots that attend together on a CPU: enough for an efficient product, few enough to skip context."""
_FLEX_BLOCK = 128


class Tile(NamedTuple):
    """Blocks [first, last) of one document see some of the context tokens [low, high) and no others."""

    first: int
    last: int
    low: int
    high: int


@dataclass(frozen=True)
class BlockLayout:
    """Documents and positions of a batch.

    context_document, context_position: int64 [S]. block_document, block_anchor: int64 [N].
    Positions count from each document's start. tiles: the CPU's plan, empty on a GPU.
    """

    PADDING_CONTEXT: ClassVar[int] = -1
    PADDING_BLOCK: ClassVar[int] = -2

    context_document: Tensor
    context_position: Tensor
    block_document: Tensor
    block_anchor: Tensor
    block_size: int
    tiles: tuple[Tile, ...] = ()

    @property
    def slot_position(self) -> Tensor:
        """int64 [N*B]: the position of every draft slot."""
        offsets = torch.arange(self.block_size, device=self.block_anchor.device)
        return (self.block_anchor[:, None] + offsets).flatten()


def visible(layout: BlockLayout, window: int | None, query: Tensor, key: Tensor) -> Tensor:
    """Whether draft slot `query` sees key `key`: bool, shapes broadcast. window None: a full layer.

    query counts slots 0..N*B-1; key counts context 0..S-1, then slots S..S+N*B-1.
    """
    size, context = layout.block_size, len(layout.context_document)
    block, offset = query // size, query % size
    document, anchor = layout.block_document[block], layout.block_anchor[block]
    slot = (key - context).clamp(min=0)
    sees_slot = (key >= context) & (slot // size == block) & (document != BlockLayout.PADDING_BLOCK)
    if window is not None:
        sees_slot = sees_slot & (slot % size <= offset)
    if context == 0:
        return sees_slot
    token = key.clamp(max=context - 1)
    position = layout.context_position[token]
    sees_context = (key < context) & (layout.context_document[token] == document) & (position < anchor)
    if window is not None:
        sees_context = sees_context & (position >= anchor + offset - (window - 1))
    return sees_context | sees_slot


class Attention(Protocol):
    """Attends from draft slots to context and slots by a fixed mask."""

    def __call__(self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor]) -> Tensor:
        """query [Q, H, d]; context: keys, values [S, G, d]; block the same [Q, G, d]; gives [Q, H, d]."""


class DenseAttention:
    """One [Q, S+Q] mask and torch's scaled dot product: simple, and quadratic in the batch."""

    def __init__(self, layout: BlockLayout, window: int | None) -> None:
        self.mask = dense_mask(layout, window)

    def __call__(self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor]) -> Tensor:
        """See `Attention`."""
        keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(context, block, strict=True))
        seen = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=self.mask, enable_gqa=True
        )
        return seen[0].transpose(0, 1).masked_fill(~self.mask.any(1)[:, None, None], 0.0)


def dense_mask(layout: BlockLayout, window: int | None) -> Tensor:
    """bool [Q, S+Q]: the whole mask, written out."""
    device = layout.block_anchor.device
    slots = len(layout.block_anchor) * layout.block_size
    keys = torch.arange(len(layout.context_document) + slots, device=device)
    return visible(layout, window, torch.arange(slots, device=device)[:, None], keys)


class FlexAttention:
    """FlexAttention with a block mask: what GPUs run. Compiled there; the eager form serves tests."""

    def __init__(self, layout: BlockLayout, window: int | None) -> None:
        self.mask = flex_mask(layout, window)
        self._attend = _flex_functions(layout.block_anchor.is_cuda)[1]

    def __call__(self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor]) -> Tensor:
        """See `Attention`."""
        keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(context, block, strict=True))
        seen = self._attend(
            query.transpose(0, 1)[None], keys[None], values[None], block_mask=self.mask, enable_gqa=True
        )
        return torch.Tensor.transpose(seen[0], 0, 1)


def flex_mask(layout: BlockLayout, window: int | None) -> "BlockMask":
    """The mask as FlexAttention takes it; built by a compiled function on a GPU (never Q x KV in memory)."""

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(layout, window, query, key)

    slots = len(layout.block_anchor) * layout.block_size
    build = _flex_functions(layout.block_anchor.is_cuda)[0]
    mask: BlockMask = build(
        mask_mod,
        None,
        None,
        slots,
        len(layout.context_document) + slots,
        device=str(layout.block_anchor.device),
        BLOCK_SIZE=_FLEX_BLOCK,
    )
    return mask


@functools.cache
def _flex_functions(compiled: bool) -> tuple[Any, Any]:
    """create_block_mask and flex_attention; imported at first use, for it costs a CPU seconds for nothing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return create_block_mask, flex_attention
    # Else torch goes on eagerly with one warning, with the whole score matrix: slow, then out of memory.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(create_block_mask), torch.compile(flex_attention)


def compilations() -> int:
    """Graphs that torch has compiled in this process: constant once the first lengths were seen."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a CPU seconds
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class TiledAttention:
    """Tile by tile: each tile's slots against its slice of context and their own blocks."""

    def __init__(self, layout: BlockLayout, window: int | None) -> None:
        self._size = layout.block_size
        self._tiles = layout.tiles
        self._causal = window is not None
        offsets = torch.arange(layout.block_size)
        self._hidden: list[Tensor] = []
        for tile in layout.tiles:
            anchor = layout.block_anchor[tile.first : tile.last, None, None]
            position = layout.context_position[tile.low : tile.high]
            hidden = position >= anchor
            if window is not None:
                hidden = hidden | (position < anchor + offsets[:, None] - (window - 1))
            slots = (tile.last - tile.first) * self._size
            self._hidden.append(hidden.expand(-1, self._size, -1).reshape(slots, len(position)))

    def __call__(self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor]) -> Tensor:
        """See `Attention`."""
        outputs = []
        for tile, hidden in zip(self._tiles, self._hidden, strict=True):
            slots = slice(tile.first * self._size, tile.last * self._size)
            tokens = slice(tile.low, tile.high)
            outputs.append(
                attend_blocks(
                    query[slots],
                    (context[0][tokens], context[1][tokens]),
                    (block[0][slots], block[1][slots]),
                    self._size,
                    hidden=hidden,
                    causal=self._causal,
                )
            )
        attended = sum(len(output) for output in outputs)
        if attended < len(query):  # padding blocks see nothing; yet a batch of nothing else keeps its graph
            nothing = sum((part.sum() for part in (*context, *block)), start=query.new_zeros(())) * 0.0
            outputs.append(query[attended:] * 0.0 + nothing)
        return torch.cat(outputs)


def attend_blocks(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    size: int,
    *,
    hidden: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attention of whole blocks to one slice of context and each to itself: [Q, H, d].

    query [Q, H, d]; context keys and values [C, G, d]; block keys and values [Q, G, d]; hidden:
    bool [Q, C], true where a token is not to be seen, or None. Decoding uses it with one block.
    """
    slots, heads, width = query.shape
    groups = block[0].shape[1]
    share, blocks = heads // groups, slots // size
    # [G, Q * heads per group, d]: the query heads of a group are rows of one product.
    rows = (query * width**-0.5).view(slots, groups, share, width).transpose(0, 1).reshape(groups, -1, width)
    scores = rows @ context[0].permute(1, 2, 0)
    if hidden is not None:
        scores = scores.view(groups, slots, share, -1).masked_fill(hidden[:, None], -torch.inf)
        scores = scores.view(groups, slots * share, -1)
    own_keys = block[0].transpose(0, 1).reshape(groups, blocks, size, width)
    own_values = block[1].transpose(0, 1).reshape(groups, blocks, size, width)
    own = rows.view(groups, blocks, size * share, width) @ own_keys.transpose(2, 3)
    if causal:
        later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
        own = own.view(groups, blocks, size, share, size).masked_fill(later[:, None], -torch.inf)
    shares = torch.softmax(torch.cat([scores, own.reshape(groups, slots * share, size)], -1), -1)
    of_context, of_block = torch.split(shares, [scores.shape[-1], size], -1)
    seen = of_context @ context[1].transpose(0, 1)
    seen = seen + (of_block.reshape(groups, blocks, size * share, size) @ own_values).view_as(seen)
    by_slot: Tensor = seen.view(groups, slots, share, width).transpose(0, 1)
    return by_slot.reshape(slots, heads, width)


def plan_tiles(
    documents: np.ndarray, anchors: np.ndarray, context_lengths: Sequence[int], shape: DraftShape
) -> tuple[Tile, ...]:
    """Cut each document's blocks (sorted by anchor) into tiles, with the context each can see."""
    per_tile = max(1, _TILE_SLOTS // shape.block_size)
    starts = np.concatenate([[0], np.cumsum(context_lengths)])
    full = "full_attention" in shape.layer_types
    tiles = []
    for document in np.unique(documents):
        first, end = np.searchsorted(documents, [document, document + 1])
        for low in range(first, end, per_tile):
            high = min(low + per_tile, end)
            reach = 0 if full or shape.sliding_window is None else anchors[low] - (shape.sliding_window - 1)
            start = int(starts[document])
            tiles.append(
                Tile(int(low), int(high), start + max(0, int(reach)), start + int(anchors[high - 1]))
            )
    return tuple(tiles)


def pad_to_bucket(count: int, unit: int) -> int:
    """The next of few sizes: `count * unit` rounded up to a multiple of 128 with 3 leading bits.

    Eight sizes an octave at most, so lengths never seen before do not mean a new compilation each;
    at most an eighth of a long batch is padding.
    """
    total = max(count * unit, 1)
    grain = max(_FLEX_BLOCK, 1 << max(0, total.bit_length() - 4))
    return -(-total // grain) * grain // unit


def build_attention(layout: BlockLayout, shape: DraftShape) -> dict[str, Attention]:
    """One attention per kind of layer in the drafter, for one step."""
    kind: type[FlexAttention | TiledAttention] = (
        FlexAttention if layout.block_anchor.is_cuda else TiledAttention
    )
    return {
        layer_type: kind(layout, shape.sliding_window if layer_type == "sliding_attention" else None)
        for layer_type in sorted(set(shape.layer_types))
    }
