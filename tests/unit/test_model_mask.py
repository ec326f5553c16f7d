"""What a slot sees: three implementations against one written slowly from the words.

A slot of the block anchored at a, in document d, sees context of d strictly before a, and the slots
of its own block, told by block index. On a sliding layer it looks back at most `window` positions,
itself included, and sees no later slot of its block. Padding sees nothing and is not seen.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash.model import mask as mask_module
from dflash.model.mask import (
    BlockLayout,
    DenseAttention,
    FlexAttention,
    TiledAttention,
    compilations,
    dense_mask,
    flex_mask,
    pad_to_bucket,
    plan_tiles,
)
from tests.support.tiny import draft_shape


class Documents:
    """Documents with anchors, and the layout that packs them."""

    def __init__(self, documents, size, window, padding_context=0, padding_blocks=0):
        """documents: (context length, ascending anchors) each; an anchor is at most its context's length."""
        self.size, self.window = size, window
        self.context = [(d, j) for d, (length, _) in enumerate(documents) for j in range(length)]
        self.blocks = [(d, a) for d, (_, anchors) in enumerate(documents) for a in anchors]
        self.context += [(None, 0)] * padding_context
        padded = [(BlockLayout.PADDING_CONTEXT if d is None else d, j) for d, j in self.context]
        blocks = [*self.blocks, *[(BlockLayout.PADDING_BLOCK, 0)] * padding_blocks]
        self.blocks += [(None, 0)] * padding_blocks
        shape = draft_shape(block_size=size, sliding_window=window, layer_types=("sliding_attention",) * 2)
        if window is None:
            shape = draft_shape(block_size=size, sliding_window=None, layer_types=("full_attention",) * 2)
        real = np.array([b for b in blocks if b[0] >= 0], dtype=np.int64).reshape(-1, 2)
        tiles = plan_tiles(real[:, 0], real[:, 1], [n for n, _ in documents], shape)
        self.layout = BlockLayout(
            context_document=torch.tensor([d for d, _ in padded], dtype=torch.int64),
            context_position=torch.tensor([j for _, j in padded], dtype=torch.int64),
            block_document=torch.tensor([d for d, _ in blocks], dtype=torch.int64),
            block_anchor=torch.tensor([a for _, a in blocks], dtype=torch.int64),
            block_size=size,
            tiles=tiles,
        )

    def sees(self, query, key):
        """The words, one pair at a time."""
        document, anchor = self.blocks[query // self.size]
        if document is None:
            return False
        position = anchor + query % self.size
        if key < len(self.context):
            its_document, its_position = self.context[key]
            if its_document != document or its_position >= anchor:
                return False
            return self.window is None or its_position >= position - (self.window - 1)
        slot = key - len(self.context)
        if slot // self.size != query // self.size:
            return False
        return self.window is None or slot % self.size <= query % self.size

    def mask(self):
        slots = len(self.blocks) * self.size
        return torch.tensor(
            [[self.sees(q, k) for k in range(len(self.context) + slots)] for q in range(slots)]
        ).reshape(slots, -1)


@st.composite
def documents(draw):
    size = draw(st.integers(2, 5))
    docs = []
    for _ in range(draw(st.integers(1, 3))):
        anchors = sorted(draw(st.sets(st.integers(0, 12), max_size=4)))
        docs.append((anchors[-1] if anchors else draw(st.integers(0, 3)), anchors))
    if not any(anchors for _, anchors in docs):
        docs[0] = (3, [1, 3])
    window = draw(st.none() | st.integers(size, 10))
    return Documents(docs, size, window, draw(st.integers(0, 3)), draw(st.integers(0, 2)))


def attend_slowly(mask, query, context, block):
    """Softmax attention in float64, row by row; a row that sees nothing gives zeros."""
    keys, values = (torch.cat(pair).double() for pair in zip(context, block, strict=True))
    share = query.shape[1] // keys.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for slot in range(len(query)):
        seen = mask[slot].nonzero().flatten()
        if not len(seen):
            continue
        for head in range(query.shape[1]):
            k, v = keys[seen, head // share], values[seen, head // share]
            scores = k @ query[slot, head].double() / math.sqrt(query.shape[2])
            out[slot, head] = torch.softmax(scores, 0) @ v
    return out


def tensors(docs, seed=0):
    """Random queries (4 heads), context and block keys and values (2 heads), of width 8."""
    generator = torch.Generator().manual_seed(seed)
    slots, context = len(docs.blocks) * docs.size, len(docs.context)

    def make(*size):
        return torch.randn(size, generator=generator, requires_grad=True)

    return (
        make(slots, 4, 8),
        (make(context, 2, 8), make(context, 2, 8)),
        (make(slots, 2, 8), make(slots, 2, 8)),
    )


@settings(max_examples=60, deadline=None)
@given(documents())
def test_the_dense_and_the_flex_mask_say_the_same_as_the_words(docs):
    expected = docs.mask()
    assert torch.equal(dense_mask(docs.layout, docs.window), expected)
    mask = flex_mask(docs.layout, docs.window)
    slots, keys = torch.arange(expected.shape[0])[:, None], torch.arange(expected.shape[1])
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, slots, keys).expand_as(expected), expected)


@settings(max_examples=40, deadline=None)
@given(documents())
def test_flex_attention_equals_the_slow_one(docs):
    with torch.no_grad():  # it has no backward on a CPU
        query, context, block = (detached(part) for part in tensors(docs))
        found = FlexAttention(docs.layout, docs.window)(query, context, block)
    torch.testing.assert_close(
        found.double(), attend_slowly(docs.mask(), query, context, block), rtol=1e-4, atol=1e-5
    )


def detached(part):
    return part.detach() if isinstance(part, torch.Tensor) else tuple(tensor.detach() for tensor in part)


@settings(max_examples=40, deadline=None)
@given(documents(), st.sampled_from([DenseAttention, TiledAttention]))
def test_dense_and_tiled_attention_equal_the_slow_one_in_values_and_gradients(docs, kind):
    query, context, block = inputs = tensors(docs)
    expected = attend_slowly(docs.mask(), query, context, block)
    found = kind(docs.layout, docs.window)(query, context, block)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    leaves = [inputs[0], *inputs[1], *inputs[2]]
    of_found = torch.autograd.grad((found * weights).sum(), leaves, allow_unused=True)
    of_expected = torch.autograd.grad((expected * weights.double()).sum(), leaves, allow_unused=True)
    for leaf, one, other in zip(leaves, of_found, of_expected, strict=True):
        pair = [torch.zeros_like(leaf) if grad is None else grad for grad in (one, other)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [DenseAttention, TiledAttention])
@pytest.mark.parametrize("window", [None, 6])
def test_padding_blocks_leave_finite_gradients_equal_to_those_without_them(kind, window):
    plain = Documents([(9, [2, 3, 9])], 4, window)
    padded = Documents([(9, [2, 3, 9])], 4, window, padding_context=5, padding_blocks=1)
    gradients = []
    for docs in (plain, padded):
        query, context, block = tensors(padded)
        slots, tokens = len(docs.blocks) * docs.size, len(docs.context)
        leaves = [query, *context, *block]
        out = kind(docs.layout, docs.window)(
            query[:slots], tuple(t[:tokens] for t in context), tuple(t[:slots] for t in block)
        )
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*gradients, strict=True):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(one, other)


def test_blocks_closer_than_their_size_and_equal_anchors_of_two_documents_stay_apart():
    docs = Documents([(14, [10, 14]), (14, [10, 14])], 16, None)
    mask = dense_mask(docs.layout, None)
    for block, (document, anchor) in enumerate(docs.blocks):
        rows = mask[block * 16 : (block + 1) * 16]
        seen = rows.any(0).nonzero().flatten().tolist()
        own_context = [document * 14 + j for j in range(anchor)]
        assert seen == own_context + [28 + block * 16 + k for k in range(16)]
        assert torch.equal(rows.all(0), rows.any(0))


def test_a_sliding_layer_reaches_back_one_window_from_each_slots_own_position():
    docs = Documents([(20, [20])], 4, 8)
    mask = dense_mask(docs.layout, 8)
    for offset in range(4):
        assert mask[offset, :20].nonzero().flatten().tolist() == list(range(20 + offset - 7, 20))
        assert mask[offset, 20:].nonzero().flatten().tolist() == list(range(offset + 1))


def test_tiles_leave_out_context_that_no_slot_of_theirs_can_see():
    anchors = np.arange(100, 2100, 4)
    shape = draft_shape(block_size=16, sliding_window=64, layer_types=("sliding_attention",) * 2)
    tiles = plan_tiles(np.zeros(len(anchors), np.int64), anchors, [2099], shape)
    assert sum(t.last - t.first for t in tiles) == len(anchors)
    assert max(t.high - t.low for t in tiles) < 64 + 16 * 4 + 1


def test_lengths_fall_into_few_buckets_with_little_padding():
    sizes = {pad_to_bucket(n, 1) for n in range(1, 100_000)}
    assert len(sizes) < 80
    assert all(n <= pad_to_bucket(n, 1) for n in range(1, 100_000, 7))
    assert all(pad_to_bucket(n, 1) <= 1.13 * n + 128 for n in range(1, 100_000, 7))
    assert pad_to_bucket(3, 16) * 16 % 128 == 0


def test_twenty_lengths_are_compiled_a_few_times_and_no_more(monkeypatch):
    """Traced as on a GPU; only the last step, from graph to kernels, is left out."""
    traced = torch.compile(create_block_mask, backend="eager")
    monkeypatch.setattr(mask_module, "_flex_functions", lambda _compiled: (traced, flex_attention))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    lengths = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(20):
        context = pad_to_bucket(int(torch.randint(200, 3000, (1,), generator=lengths)), 1)
        blocks = pad_to_bucket(int(torch.randint(10, 200, (1,), generator=lengths)), 8)
        layout = BlockLayout(
            context_document=torch.zeros(context, dtype=torch.int64),
            context_position=torch.arange(context),
            block_document=torch.zeros(blocks, dtype=torch.int64),
            block_anchor=torch.arange(blocks) + 1,
            block_size=8,
        )
        for window in (None, 64):
            flex_mask(layout, window)
        seen.append(compilations())
    assert seen[0] < seen[2]  # it does count
    assert seen[-1] == seen[4]
    assert seen[-1] - seen[0] <= 6
