"""Our training step against a straightforward eager one: dense mask, padding, all logits; one thread, bf16.

ratio_dense, ratio_packed, ratio_packed_mild, ratio_wide: its time over ours. memory_wide: our extra
memory over its.
bound_share: time of the step's unavoidable matrix products, at the rate this machine reaches in a large
one, over the time of our step (dense). The *_blend figures have distillation on. share_*: where one
dense step's time goes (mask, layers, head and loss, backward, optimiser).
"""

import itertools
import sys
import time

import orjson
import torch
from torch.nn import functional

from dflash.model.mask import build_attention
from dflash.objective.batch import pack
from dflash.objective.step import block_step, row_losses
from dflash.objective.weights import Objective
from dflash.planning.step_cost import step_cost
from tests.bench import cases
from tests.bench.cases import BLEND, PLAIN, Case
from tests.bench.eager import eager_step
from tests.bench.measure import in_a_process, interleaved, reset_peak, resident_mib


def ours(case: Case, objective: Objective = PLAIN) -> None:
    """Packing included, as the eager step pads."""
    batch = pack(case.samples, case.drafter.shape, anchors=case.anchors, seed=0, epoch=0)
    block_step(case.drafter, case.tables, batch, objective)


def eager(case: Case, objective: Objective = PLAIN) -> None:
    """The other side."""
    eager_step(case.drafter, case.tables, case.samples, objective, case.anchors)


def large_product(case: Case) -> float:
    """FLOPs of one large product of the head's shape, which sets the machine's rate."""
    rows = torch.ones(512, case.tables.head.shape[1], dtype=torch.bfloat16)
    torch.mm(rows, case.tables.head.t())
    return 2.0 * rows.numel() * case.tables.head.shape[0]


def run(quick: bool) -> dict[str, float]:
    """All figures; about a minute when quick."""
    torch.set_num_threads(1)
    repeats = 3 if quick else 9
    figures: dict[str, float] = {}
    dense = cases.dense()
    rate_case = {
        "ours": lambda: ours(dense),
        "eager": lambda: eager(dense),
        "product": lambda: large_product(dense),
    }
    times = interleaved(rate_case, repeats)
    figures["ratio_dense"] = times["eager"] / times["ours"]
    batch = pack(dense.samples, dense.drafter.shape, anchors=dense.anchors, seed=0, epoch=0)
    cost = step_cost(
        dense.drafter.shape,
        context=len(batch.taps),
        blocks=batch.blocks,
        rows=len(batch.rows),
        seen=[int(a) for a in batch.layout.block_anchor],
    )
    rate = large_product(dense) / times["product"]
    figures["bound_share"] = cost.flops / rate / times["ours"]
    figures |= breakdown(dense)
    several = {"packed": cases.packed(), "packed_mild": cases.packed_mild(), "wide": cases.wide()}
    for name, case in several.items():
        times = interleaved({"ours": lambda c=case: ours(c), "eager": lambda c=case: eager(c)}, repeats)  # type: ignore[misc]
        figures[f"ratio_{name}"] = times["eager"] / times["ours"]
    for name, case in (("dense", dense), ("packed", cases.packed())):
        times = interleaved(
            {"ours": lambda c=case: ours(c, BLEND), "eager": lambda c=case: eager(c, BLEND)},  # type: ignore[misc]
            max(2, repeats // 2),
        )
        figures[f"ratio_{name}_blend"] = times["eager"] / times["ours"]
    memory = {side: in_a_process("tests.bench.bench_step", side)["extra_mib"] for side in ("ours", "eager")}
    figures["memory_wide"] = memory["ours"] / memory["eager"]
    return figures


def breakdown(case: Case) -> dict[str, float]:
    """Shares of one step with its optimiser, taken apart by hand."""
    shape = case.drafter.shape
    optimizer = torch.optim.AdamW(case.drafter.parameters(), fused=True)
    marks: list[tuple[str, float]] = []

    def mark(name: str) -> None:
        marks.append((name, time.process_time()))

    for _ in range(2):  # the first one warms up
        marks.clear()
        mark("start")
        batch = pack(case.samples, shape, anchors=case.anchors, seed=0, epoch=0)
        mark("pack")
        build_attention(batch.layout, shape)
        mark("mask")
        inputs = functional.embedding(batch.tokens.flatten(), case.tables.embedding)
        hidden = case.drafter(batch.taps, inputs, batch.layout).index_select(0, batch.rows)
        mark("layers")
        losses = row_losses(hidden, case.tables, batch, PLAIN, shape.block_size)
        mark("head_loss")
        hidden.backward(losses.gradient)
        mark("backward")
        optimizer.step()
        mark("optimiser")
    spent = {name: end - start for (_, start), (name, end) in itertools.pairwise(marks)}
    spent["layers"] -= spent["mask"]  # the forward builds it too
    total = sum(spent.values())
    return {f"share_{name}": seconds / total for name, seconds in spent.items()}


def main(side: str) -> None:
    """Extra memory of one `wide` step, as a process of its own."""
    torch.set_num_threads(1)
    case = cases.wide()
    before = resident_mib()
    reset_peak()
    {"ours": ours, "eager": eager}[side](case)
    sys.stdout.write(orjson.dumps({"extra_mib": resident_mib("VmHWM") - before}).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
