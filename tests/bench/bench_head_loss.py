"""The fused head and loss against the naive one: its memory at 8,192 x 248,320, and its speed.

extra_mib: peak memory beyond inputs and gradient, 8,192 rows, vocabulary 248,320, hidden 256, bf16, with
distillation. naive_mib: what the naive form takes for a 32nd of the rows, times 32 (it does not fit).
speed_ratio: naive time over ours where naive fits, with distillation; speed_ratio_plain: without.
"""

import sys

import numpy as np
import orjson
import torch
from torch import Tensor
from torch.nn import functional

from dflash.objective.head_loss import Teacher, default_chunk_rows, head_loss, plan_chunks
from tests.bench.measure import in_a_process, interleaved, reset_peak, resident_mib

BLOCK, WIDTH, VOCABULARY = 8, 256, 248_320
KL_WEIGHT, TEMPERATURE = 0.7, 1.0


def problem(rows: int) -> tuple[Tensor, Tensor, Tensor, Teacher]:
    """Random hidden states, head, labels and a teacher whose positions two rows share."""
    generator = torch.Generator().manual_seed(0)

    def make(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).mul_(0.2).bfloat16()

    labels = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    return (
        make(rows, WIDTH),
        make(VOCABULARY, WIDTH),
        labels,
        Teacher(make(rows // 2, WIDTH), torch.arange(rows) // 2),
    )


def fused(hidden: Tensor, head: Tensor, labels: Tensor, teacher: Teacher, kl_weight: float) -> None:
    """Ours."""
    slots = np.arange(len(hidden))
    chunks = plan_chunks(slots, teacher.rows.numpy(), BLOCK, default_chunk_rows(head))
    head_loss(
        hidden,
        head,
        labels,
        chunks,
        lambda _chunk, correct, _probability: torch.ones(len(correct)),
        teacher=teacher,
        kl_weight=kl_weight,
        temperature=TEMPERATURE,
    )


def naive(hidden: Tensor, head: Tensor, labels: Tensor, teacher: Teacher, kl_weight: float) -> None:
    """All logits at once, and autograd."""
    hidden = hidden.detach().requires_grad_(True)
    logits = functional.linear(hidden, head)
    loss = (1 - kl_weight) * functional.cross_entropy(logits, labels)
    if kl_weight > 0:
        target = torch.softmax(functional.linear(teacher.states[teacher.rows], head) / TEMPERATURE, -1)
        draft = torch.log_softmax(logits / TEMPERATURE, -1)
        loss = loss + kl_weight * TEMPERATURE**2 * functional.kl_div(draft, target, reduction="sum")
    loss.backward()


def run(quick: bool) -> dict[str, float]:
    """All figures; about two minutes when quick."""
    torch.set_num_threads(1)
    figures = in_a_process("tests.bench.bench_head_loss", "fused", "8192")
    part = in_a_process("tests.bench.bench_head_loss", "naive", "256")
    inputs = problem(384)
    for name, weight in (("speed_ratio", KL_WEIGHT), ("speed_ratio_plain", 0.0)):
        times = interleaved(
            {"fused": lambda w=weight: fused(*inputs, w), "naive": lambda w=weight: naive(*inputs, w)},  # type: ignore[misc]
            3 if quick else 9,
        )
        figures[name] = times["naive"] / times["fused"]
    return figures | {"naive_mib": part["extra_mib"] * 32}


def main(kind: str, rows: int) -> None:
    """Extra memory of one pass, as a process of its own."""
    torch.set_num_threads(1)
    inputs = problem(rows)
    before = resident_mib()
    reset_peak()
    {"fused": fused, "naive": naive}[kind](*inputs, KL_WEIGHT)
    sys.stdout.write(orjson.dumps({"extra_mib": resident_mib("VmHWM") - before}).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
