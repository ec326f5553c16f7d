"""Checks of received states that a healthy target always passes: finite, not constant, not zero.

Each tap, and the final state, is judged on its own, because one broken layer is what faults look like.
Lengths, identity and checksums are checked where they are known (`loop`, `receipt`, `wire`).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.channel.interface import Identity
from dflash.channel.wire import separate
from dflash.model.states import States

_FIRST_NUMBERS = 8
"""Of a tap's last row: if they differ, the tap is not constant. All alike by chance is next to impossible."""


_CACHED_BYTES = 1 << 20
"""What is looked at twice while it is in the cache: memory is read once."""


def is_finite(numbers: Tensor) -> bool:
    """Whether all numbers (bfloat16 or float32) are finite.

    On a GPU their sum is asked, which is False also where it is more than the dtype holds. On a CPU this
    thread looks at the bits: torch would call its worker threads, which then wait for more work in a busy
    loop, on cores that the wire and the training step need (it cost a third of the link's rate on two cores).
    """
    if numbers.device.type != "cpu":
        return math.isfinite(float(numbers.sum()))
    # As signed integers, positive infinity and NaN are the largest of all; as unsigned, the negative are.
    infinity = torch.tensor([math.inf, -math.inf], dtype=numbers.dtype)
    signed, unsigned = ((torch.int16, np.uint16), (torch.int32, np.uint32))[numbers.itemsize == 4]
    top, bottom = infinity.view(signed).numpy()
    bits = numbers.flatten().view(signed).numpy()
    step = _CACHED_BYTES // numbers.itemsize
    return all(
        part.max() < top and part.view(unsigned).max() < bottom.view(unsigned)
        for part in (bits[i : i + step] for i in range(0, len(bits), step))
    )


def find_faults(
    batch: States, lengths: Sequence[int], identity: Identity, *, finite: bool
) -> list[str | None]:
    """Name the first fault of each sample of a batch, or None.

    `batch` has the states of all samples one behind another, of these lengths. `finite`: that all numbers are
    is known already, by `is_finite` on each of their parts. Healthy samples are passed by two questions:
    whether their sum is finite, and whether the first numbers of each tap differ at the last token (if they
    do, the tap is neither constant nor zero). Only who fails these is looked at closely.
    """
    samples = separate(batch, lengths)
    doubtful = _alike(batch, lengths, identity)
    if not finite:
        sums = [is_finite(s.taps) and (s.final is None or is_finite(s.final)) for s in samples]
        doubtful = [alike or not summed for alike, summed in zip(doubtful, sums, strict=True)]
    return [
        _find_fault(states, identity) if doubt else None
        for states, doubt in zip(samples, doubtful, strict=True)
    ]


def _alike(batch: States, lengths: Sequence[int], identity: Identity) -> list[bool]:
    """Per sample, whether at its last token some tap's, or the final state's, first numbers are alike."""
    last = torch.tensor(lengths).cumsum(0).sub(1).to(batch.taps.device)
    first = min(_FIRST_NUMBERS, identity.hidden_size)
    rows = batch.taps.view(len(batch.taps), len(identity.taps), identity.hidden_size)
    taps = rows[:, :, :first].index_select(0, last)  # where `[last]` would call torch's worker threads
    alike = (taps == taps[:, :, :1]).all(dim=2).any(dim=1)
    if batch.final is not None:
        final = batch.final[:, :first].index_select(0, last)
        alike |= (final == final[:, :1]).all(dim=1)
    answer: list[bool] = alike.tolist()
    return answer


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
