"""Checks of received states that a healthy target always passes: finite, not constant, not zero.

Each tap, and the final state, is judged on its own, because one broken layer is what faults look like.
Lengths, identity and checksums are checked where they are known (`client`, `wire`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.channel.interface import Identity
from dflash.model.states import States


def find_faults(
    batch: Sequence[States], identity: Identity, numbers: Tensor | None = None
) -> list[str | None]:
    """Name the first fault of each sample of a batch, or None.

    `numbers`: the states of all samples in one row, where they lie so; one sum then does for all of them.
    Healthy samples are passed by two questions that cost one read of the data together: whether the sum
    is finite (one element that is not makes it so), and whether the last token's states differ within
    each tap (if they do, the tap is neither constant nor zero). Only who fails these is looked at closely.
    """
    if numbers is not None and math.isfinite(float(numbers.sum())):
        doubtful = [False] * len(batch)
    else:
        doubtful = [not math.isfinite(total) for total in _sums(batch)]
    for index, flat_row in enumerate(_flat_rows(batch, identity)):
        doubtful[index] = doubtful[index] or flat_row
    return [
        _find_fault(states, identity) if doubt else None
        for states, doubt in zip(batch, doubtful, strict=True)
    ]


def _sums(batch: Sequence[States]) -> list[float]:
    """Per sample a number that is finite only if all its states are (and do not add up to 1e38)."""
    totals = torch.stack([part.sum() for states in batch for part in _tensors(states)]).reshape(
        len(batch), -1
    )
    sums: list[float] = totals.float().sum(dim=1).tolist()
    return sums


def _flat_rows(batch: Sequence[States], identity: Identity) -> list[bool]:
    """Per sample, whether some tap of its last token has the same number everywhere."""
    rows = torch.stack([torch.cat([part[-1] for part in _tensors(states)]) for states in batch])
    rows = rows.view(len(batch), -1, identity.hidden_size)
    flat: list[bool] = (rows == rows[:, :, :1]).all(dim=2).any(dim=1).tolist()
    return flat


def _find_fault(states: States, identity: Identity) -> str | None:
    """The close look: bounds of each part."""
    size = identity.hidden_size
    parts = [states.taps[:, k * size : (k + 1) * size] for k in range(len(identity.taps))]
    if states.final is not None:
        parts.append(states.final)
    for index, part in enumerate(parts):
        where = f"tap {identity.taps[index]}" if index < len(identity.taps) else "the final state"
        low, high = (float(bound) for bound in torch.aminmax(part))  # both NaN if one element is
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{where} is not finite"
        if low == high:
            return f"{where} is all zero" if low == 0.0 else f"{where} is constant"
    return None


def _tensors(states: States) -> list[Tensor]:
    return [states.taps] if states.final is None else [states.taps, states.final]
