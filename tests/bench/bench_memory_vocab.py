"""Peak memory of a drafter's process as the vocabulary grows from 8 K to 256 K, the model fixed.

peak_mib_8k, peak_mib_256k: peak resident memory of a process that loads tables, makes a drafter of 4
layers at hidden 256 and takes two steps of 2,048 slots with distillation, noise and AdamW, in bf16.
table_mib_256k: the part of it that is the (tied) table. logits_mib_256k: what the student's and the
teacher's logits and their gradient would take if they were made for all slots at once.
"""

import dataclasses
import sys

import orjson
import torch

from dflash.objective.batch import pack
from dflash.objective.step import block_step
from tests.bench.cases import BLEND, SHAPE, make
from tests.bench.measure import in_a_process, resident_mib

_WIDTH, _SLOTS = 256, 2048


def run(quick: bool) -> dict[str, float]:
    """All figures; half a minute."""
    figures: dict[str, float] = {}
    for name, vocabulary in (("8k", 8_192), ("256k", 262_144)):
        figures[f"peak_mib_{name}"] = in_a_process("tests.bench.bench_memory_vocab", str(vocabulary))[
            "peak_mib"
        ]
    return figures | {
        "table_mib_256k": 262_144 * _WIDTH * 2 / 2**20,
        "logits_mib_256k": 3 * _SLOTS * 262_144 * 2 / 2**20,
    }


def main(vocabulary: int) -> None:
    """Two steps in this process, and its peak."""
    torch.set_num_threads(1)
    shape = dataclasses.replace(
        SHAPE,
        hidden_size=_WIDTH,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate_size=768,
        vocab_size=vocabulary,
        layer_types=("full_attention",) * 4,
    )
    case = make(shape, [512] * 4, 0.2, _SLOTS // 4 // shape.block_size)
    optimizer = torch.optim.AdamW(case.drafter.parameters())
    for epoch in range(2):
        batch = pack(case.samples, shape, anchors=case.anchors, seed=0, epoch=epoch)
        sums = block_step(case.drafter, case.tables, batch, BLEND, noise_std=0.1)
        for parameter in case.drafter.parameters():
            if parameter.grad is not None:
                parameter.grad /= sums.weight
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(orjson.dumps({"peak_mib": resident_mib("VmHWM")}).decode() + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
