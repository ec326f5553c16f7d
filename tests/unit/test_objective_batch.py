"""Packing: labels stay inside their sample, rows and teacher lines point where they should."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DflashError
from dflash.objective.batch import Sample, pack
from dflash.objective.head_loss import plan_chunks
from tests.support.tiny import draft_shape, random_sample

SHAPE = draft_shape()


@st.composite
def samples(draw):
    made = []
    for number in range(draw(st.integers(1, 4))):
        marks = draw(st.lists(st.booleans(), min_size=1, max_size=30))
        sample = random_sample(SHAPE, len(marks), 0, number)
        made.append(dataclasses.replace(sample, supervised=torch.tensor(marks)))
    return made


@settings(max_examples=80, deadline=None)
@given(samples(), st.integers(1, 8))
def test_every_row_is_a_supervised_slot_inside_its_sample_with_the_states_before_it(made, budget):
    batch = pack(made, SHAPE, anchors=budget, seed=0, epoch=0)
    found = {}
    for row, label, line in zip(batch.rows.tolist(), batch.labels.tolist(), batch.teacher_rows, strict=True):
        block, slot = divmod(row, SHAPE.block_size)
        document, anchor = int(batch.layout.block_document[block]), int(batch.layout.block_anchor[block])
        position = anchor + slot
        assert slot >= 1
        assert position < len(made[document].ids)
        assert made[document].supervised[position]
        assert label == made[document].ids[position]
        assert torch.equal(batch.teacher[line], made[document].states.final[position - 1])
        found[block, slot] = position
    for block in range(batch.blocks):
        document, anchor = int(batch.layout.block_document[block]), int(batch.layout.block_anchor[block])
        marks = made[document].supervised.tolist()
        expected = {k for k in range(1, SHAPE.block_size) if anchor + k < len(marks) and marks[anchor + k]}
        assert {slot for b, slot in found if b == block} == expected
        assert 1 in expected
        tokens = batch.tokens[block].tolist()
        assert tokens == [int(made[document].ids[anchor]), *[SHAPE.mask_token_id] * (SHAPE.block_size - 1)]
    assert torch.equal(torch.unique(batch.teacher_rows), torch.arange(len(batch.teacher)))


@settings(max_examples=50, deadline=None)
@given(samples(), st.integers(1, 8))
def test_context_is_each_samples_own_from_position_0_to_its_last_anchor(made, budget):
    batch = pack(made, SHAPE, anchors=budget, seed=0, epoch=0)
    start = 0
    for document, length in enumerate(batch.context_lengths):
        here = slice(start, start + length)
        assert batch.layout.context_document[here].tolist() == [document] * length
        assert batch.layout.context_position[here].tolist() == list(range(length))
        assert torch.equal(batch.taps[here], made[document].states.taps[:length])
        anchors = batch.layout.block_anchor[batch.layout.block_document == document]
        assert length == (int(anchors.max()) if len(anchors) else 0)
        start += length
    assert start == len(batch.taps)


@settings(max_examples=50, deadline=None)
@given(samples(), st.integers(1, 40))
def test_chunks_hold_whole_blocks_and_every_line_their_rows_need(made, rows_per_chunk):
    batch = pack(made, SHAPE, anchors=8, seed=0, epoch=0)
    chunks = plan_chunks(batch.rows_host, batch.teacher_rows_host, SHAPE.block_size, rows_per_chunk)
    assert [c.low for c in chunks] == [0, *[c.high for c in chunks]][: len(chunks)]
    assert (chunks[-1].high if chunks else 0) == len(batch.rows)
    for chunk in chunks:
        blocks = batch.rows_host[chunk.low : chunk.high] // SHAPE.block_size
        assert set(blocks) <= set(range(chunk.first, chunk.last))
        lines = batch.teacher_rows_host[chunk.low : chunk.high]
        assert chunk.top <= lines.min()
        assert lines.max() < chunk.end
        assert chunk.high - chunk.low <= max(rows_per_chunk, SHAPE.block_size - 1)
    blocks_of_chunks = [{*range(c.first, c.last)} for c in chunks]
    assert sum(map(len, blocks_of_chunks)) == len(set().union(*blocks_of_chunks))


def test_the_last_anchor_of_a_sample_has_no_label_from_its_neighbour():
    first, second = random_sample(SHAPE, 10, 4, 1), random_sample(SHAPE, 10, 0, 2)
    batch = pack([first, second], SHAPE, anchors=99, seed=0, epoch=0)
    last = int((batch.layout.block_document == 0).nonzero().max())
    assert int(batch.layout.block_anchor[last]) == 8
    rows = batch.rows[(batch.rows // 4) == last]
    assert (rows % 4).tolist() == [1]
    assert batch.labels[(batch.rows // 4) == last].tolist() == [int(first.ids[9])]


def test_a_draw_does_not_depend_on_the_company():
    one, other = random_sample(SHAPE, 40, 5, 1), random_sample(SHAPE, 60, 5, 2)
    alone = pack([one], SHAPE, anchors=6, seed=3, epoch=1)
    together = pack([other, one], SHAPE, anchors=6, seed=3, epoch=1)
    mine = together.layout.block_document == 1
    assert torch.equal(alone.layout.block_anchor, together.layout.block_anchor[mine])
    assert alone.noise_seeds == together.noise_seeds[1:]


def test_samples_without_an_anchor_are_counted_and_become_one_padding_block():
    none = [random_sample(SHAPE, 5, 5, 1), random_sample(SHAPE, 5, 4, 2)]
    batch = pack(none, SHAPE, anchors=4, seed=0, epoch=0)
    assert (batch.blocks, batch.samples, batch.anchored_samples) == (0, 2, 0)
    assert batch.tokens.shape == (1, 4)
    assert len(batch.rows) == len(batch.taps) == 0
    some = pack([*none, random_sample(SHAPE, 9, 2, 3)], SHAPE, anchors=4, seed=0, epoch=0)
    assert (some.samples, some.anchored_samples) == (3, 1)


def test_states_that_do_not_fit_their_ids_are_refused_by_sample_id():
    sample = random_sample(SHAPE, 10, 2)
    bad = Sample("row-17", sample.ids[:9], sample.supervised[:9], sample.states)
    with pytest.raises(DflashError, match="sample row-17: 9 ids"):
        pack([bad], SHAPE, anchors=4, seed=0, epoch=0)


def test_states_captured_in_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        sample = random_sample(SHAPE, 12, 3)
    batch = pack([sample], SHAPE, anchors=4, seed=0, epoch=0)
    assert not batch.taps.is_inference()


def test_coverage_is_each_samples_own_share_of_supervised_tokens_that_a_block_predicts():
    short = dataclasses.replace(random_sample(SHAPE, 10, 0, 1), supervised=torch.ones(10, dtype=torch.bool))
    silent = dataclasses.replace(random_sample(SHAPE, 10, 0, 2), supervised=torch.zeros(10, dtype=torch.bool))
    everywhere = pack([short, silent], SHAPE, anchors=9, seed=0, epoch=0)
    assert everywhere.coverage == pytest.approx(9 / 10)  # only the first token cannot be predicted
    once = pack([short], SHAPE, anchors=1, seed=0, epoch=0)
    assert once.coverage == pytest.approx(len(once.rows_host) / 10)
