"""The step's cost from shapes, against what torch counts and keeps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash.model.drafter import DFlashDrafter
from dflash.objective.batch import pack
from dflash.objective.head_loss import default_chunk_rows, plan_chunks
from dflash.objective.step import block_step
from dflash.objective.weights import Objective
from dflash.planning.step_cost import parameter_count, step_cost
from tests.support.tiny import draft_shape, random_sample, random_tables

FULL = {"sliding_window": None, "layer_types": ("full_attention",) * 2}


def counted(shape, kl_weight):
    drafter, tables = DFlashDrafter(shape), random_tables(shape)
    batch = pack(
        [random_sample(shape, 60 + 20 * n, 10, n) for n in range(3)], shape, anchors=12, seed=0, epoch=0
    )
    chunks = plan_chunks(
        batch.rows_host, batch.teacher_rows_host, shape.block_size, default_chunk_rows(tables.head)
    )
    # A tile computes a rectangle: each of its blocks against all the context that any of them sees.
    seen = [tile.high - tile.low for tile in batch.layout.tiles for _ in range(tile.first, tile.last)]
    cost = step_cost(
        shape,
        context=len(batch.taps),
        blocks=batch.blocks,
        rows=len(batch.rows),
        seen=seen,
        teacher_rows=sum(c.end - c.top for c in chunks) if kl_weight else 0,
        chunk_rows=max(c.high - c.low for c in chunks),
        bytes_per_value=4,
    )
    kept = {}
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()), t)[1],
            lambda t: t,
        ),
        FlopCounterMode(display=False) as counter,
    ):
        block_step(drafter, tables, batch, Objective(gamma=4.0, kl_weight=kl_weight))
    for parameter in [*drafter.parameters(), tables.embedding, tables.head]:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return cost, counter.get_total_flops(), sum(kept.values())


@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
@pytest.mark.parametrize("changes", [{}, {"heads": 8, "head_dim": 32, "block_size": 8}, {"vocab_size": 3000}])
def test_flops_are_within_2_percent_of_torchs_count(changes, kl_weight):
    cost, flops, _ = counted(draft_shape(**FULL, **changes), kl_weight)
    assert cost.flops == pytest.approx(flops, rel=0.02)


@pytest.mark.parametrize("changes", [FULL, {"intermediate_size": 256, **FULL}])
def test_bytes_kept_for_the_backward_are_about_what_is_foretold(changes):
    cost, _, kept = counted(draft_shape(**changes), 0.0)
    assert cost.activation_bytes == pytest.approx(kept, rel=0.35)


FIVE = {"layers": 5, "layer_types": ("full_attention",) * 5}
DOMINO = {"head": "domino", "head_state": 48, "head_rank": 32}


@pytest.mark.parametrize("changes", [{}, FIVE, DOMINO])
def test_parameters_are_counted_exactly(changes):
    shape = draft_shape(**changes)
    assert parameter_count(shape) == sum(p.numel() for p in DFlashDrafter(shape).parameters())


def test_a_published_drafter_has_its_published_size():
    shape = draft_shape(
        hidden_size=5120, layers=5, heads=32, kv_heads=8, head_dim=128, intermediate_size=17_408,
        vocab_size=248_320, block_size=16, taps=(1, 16, 31, 46, 61), target_layers=64,
        layer_types=("sliding_attention",) * 4 + ("full_attention",), sliding_window=2048, tied=False,
    )  # fmt: skip
    # 5 x 320 M + fc's 131 M, about 1.73 B trained beside 2 x 1.27 B frozen.
    assert parameter_count(shape) == pytest.approx(1.73e9, rel=0.01)
    cost = step_cost(shape, context=4096, blocks=512, rows=512 * 15, seen=[2048] * 512)
    assert cost.table_bytes == pytest.approx(2 * 1.27e9 * 2, rel=0.01)
    # About 17 GFLOP a slot, 512 x 16 slots, and some 10 TFLOP of context: about 150 TFLOP a sample with
    # the head's products done three times; ours does them twice.
    recomputed = cost.flops + cost.head_flops // 2
    assert recomputed == pytest.approx(150e12, rel=0.1)
