"""Where blocks start: anchors drawn per sample, the same whatever batch or process draws them.

An anchor is a position a whose token and successor are both supervised (and exist): the block's
first input is a token the target produced, and its first proposal has a label.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


def seed_of(purpose: str, seed: int, epoch: int, sample_id: str) -> int:
    """A 63-bit seed for one purpose and one sample in one epoch, by sha256: no order, no state."""
    text = f"{purpose}\0{seed}\0{epoch}\0{sample_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def candidates(supervised: Tensor) -> Tensor:
    """All positions that may be anchors, ascending: int64 [C]. supervised: bool [T], on the CPU."""
    return torch.nonzero(supervised[:-1] & supervised[1:]).flatten()


def draw_anchors(supervised: Tensor, budget: int, seed: int, epoch: int, sample_id: str) -> Tensor:
    """At most `budget` anchors, uniform without replacement, ascending: int64 [n].

    supervised: bool [T] on the CPU. The budget is the sample's own, so packing starves nobody.
    """
    found = candidates(supervised)
    if len(found) <= budget:
        return found
    generator = np.random.Generator(np.random.Philox(seed_of("anchors", seed, epoch, sample_id)))
    drawn = np.sort(generator.choice(len(found), size=budget, replace=False))
    return found[torch.from_numpy(drawn)]
