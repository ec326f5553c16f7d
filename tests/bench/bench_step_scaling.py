"""How the step's time grows with anchors, context, vocabulary and layers, and whether the cost model knows.

<axis>_growth: time at the larger size over the time at the smaller, four times apart. <axis>_model: that
growth over the growth of FLOPs that `dflash.planning.step_cost` foretells (1 is exact; below 1, the
larger size is more efficient). One thread, bf16, cross entropy.
"""

import dataclasses

import torch

from dflash.objective.batch import pack
from dflash.planning.step_cost import step_cost
from tests.bench.bench_step import ours
from tests.bench.cases import SHAPE, Case, make
from tests.bench.measure import interleaved


def cases() -> dict[str, tuple[Case, Case]]:
    """A smaller and a larger case for each axis."""
    four_layers = dataclasses.replace(SHAPE, layers=4, layer_types=("full_attention",) * 4)
    one_layer = dataclasses.replace(SHAPE, layers=1, layer_types=("full_attention",))
    small, large = (dataclasses.replace(SHAPE, vocab_size=v) for v in (16_384, 65_536))
    return {
        "anchors": (make(SHAPE, [1024], 0.0, 32), make(SHAPE, [1024], 0.0, 128)),
        "context": (make(SHAPE, [512], 0.0, 64), make(SHAPE, [2048], 0.0, 64)),
        "vocabulary": (make(small, [512], 0.0, 64), make(large, [512], 0.0, 64)),
        "layers": (make(one_layer, [512], 0.0, 64), make(four_layers, [512], 0.0, 64)),
    }


def flops(case: Case) -> int:
    """By the cost model."""
    batch = pack(case.samples, case.drafter.shape, anchors=case.anchors, seed=0, epoch=0)
    return step_cost(
        case.drafter.shape,
        context=len(batch.taps),
        blocks=batch.blocks,
        rows=len(batch.rows),
        seen=[int(anchor) for anchor in batch.layout.block_anchor],
    ).flops


def run(quick: bool) -> dict[str, float]:
    """All figures; about half a minute when quick."""
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for axis, (smaller, larger) in cases().items():
        times = interleaved(
            {"smaller": lambda c=smaller: ours(c), "larger": lambda c=larger: ours(c)},  # type: ignore[misc]
            3 if quick else 9,
        )
        growth = times["larger"] / times["smaller"]
        figures[f"{axis}_growth"] = growth
        figures[f"{axis}_model"] = growth / (flops(larger) / flops(smaller))
    return figures
