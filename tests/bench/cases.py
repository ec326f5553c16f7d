"""The step's benchmark cases: a small drafter over random states, in bf16 on one thread."""

import dataclasses
from dataclasses import dataclass

import torch

from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape
from dflash.model.states import States
from dflash.model.target import Tables
from dflash.objective.batch import Sample
from dflash.objective.weights import Objective

SHAPE = DraftShape(
    hidden_size=576,
    layers=2,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49_152,
    block_size=8,
    taps=(1, 14, 27),
    target_layers=30,
    mask_token_id=16,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    max_positions=8192,
    layer_types=("full_attention", "full_attention"),
    sliding_window=None,
    tied=True,
)
PLAIN = Objective(gamma=4.0, kl_weight=0.0, streak_alpha=0.0)
"""Cross entropy with decay: the base objective, which every trainer has."""
BLEND = Objective(gamma=4.0, kl_weight=0.7, kl_temperature=1.0, streak_alpha=0.0)


@dataclass(frozen=True)
class Case:
    """What one step works on."""

    drafter: DFlashDrafter
    tables: Tables
    samples: list[Sample]
    anchors: int


def make(shape: DraftShape, lengths: list[int], prompt_share: float, anchors: int) -> Case:
    """Random samples whose first tokens are the prompt's, unsupervised."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    table = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator).mul_(0.04).to(dtype)
    samples = []
    for number, length in enumerate(lengths):
        samples.append(
            Sample(
                f"sample-{number}",
                torch.randint(20, shape.vocab_size, (length,), generator=generator),
                torch.arange(length) >= int(length * prompt_share),
                States(
                    torch.randn(length, shape.tap_width, generator=generator).to(dtype),
                    torch.randn(length, shape.hidden_size, generator=generator).to(dtype),
                ),
            )
        )
    return Case(DFlashDrafter(shape), Tables(table, table), samples, anchors)


def dense(shape: DraftShape = SHAPE) -> Case:
    """One sample of 1,024 tokens, 128 blocks of 8, every slot supervised."""
    return make(shape, [1024], 0.0, 128)


def packed() -> Case:
    """Eight samples, 40 % prompt, whose blocks run over ragged ends: 1,024 tokens in all.

    Lengths are octile midpoints of a log-normal with sigma 1: conversations' lengths have such a tail.
    """
    return make(SHAPE, [18, 35, 53, 73, 100, 140, 208, 397], 0.4, 32)


def packed_mild() -> Case:
    """The same with lengths that differ less, so that padding costs the other side less."""
    return make(SHAPE, [32, 48, 72, 100, 140, 180, 220, 232], 0.4, 32)


def wide() -> Case:
    """`dense` with a vocabulary of 151,936."""
    return dense(dataclasses.replace(SHAPE, vocab_size=151_936))
