"""Checks of received states that a healthy target always passes: finite, not constant, not zero.

Each tap, and the final state, is judged on its own, because one broken layer is what faults look like.
Lengths, identity and checksums are checked where they are known (`client`, `wire`).
"""

import torch
from torch import Tensor

from dflash.channel.interface import Identity
from dflash.model.states import States


def find_fault(states: States, identity: Identity) -> str | None:
    """Name the first fault of one sample's states, or None. One read of the data, one transfer."""
    size = identity.hidden_size
    parts = [states.taps[:, k * size : (k + 1) * size] for k in range(len(identity.taps))]
    if states.final is not None:
        parts.append(states.final)
    bounds = [bound for part in parts for bound in _extremes(part)]
    values = torch.stack(bounds).float().tolist()
    for part, (low, high) in enumerate(zip(values[::2], values[1::2], strict=True)):
        where = f"tap {identity.taps[part]}" if part < len(identity.taps) else "the final state"
        if not (abs(low) < float("inf") and abs(high) < float("inf")):  # also true of NaN
            return f"{where} is not finite"
        if low == high:
            return f"{where} is all zero" if low == 0.0 else f"{where} is constant"
    return None


def _extremes(part: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest element; both are NaN if any element is."""
    bounds = torch.aminmax(part)
    return bounds.min, bounds.max
