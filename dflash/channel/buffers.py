"""Receive buffers that come back by themselves when the last tensor in them is gone.

A receive of a hundred megabytes into fresh memory costs as much in page faults as in copying, so blocks
are used again. A block is lent as a tensor; whatever views the consumer keeps hold it, and when the last
one is dropped it is free. Only a few free blocks are kept: what is out is bounded by the window. Blocks are
mapped, not allocated, so that one that is not kept goes back to the system at once: blocks of all sizes
that come and go would leave holes in the allocator's heap, which grows by them for hours.
On a GPU torch's own allocator does all this.
"""

import mmap
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KEPT = 4
"""Free blocks kept: a receive or two under way and a consumer that frees a few at a time."""
_ROUND_BYTES = 1 << 20


class BufferPool:
    """Lends uint8 tensors. From any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> Tensor:
        """A tensor of `size` bytes with any content."""
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        block = self._find(size)
        if block is None:
            pages = mmap.mmap(
                -1, -(-size // _ROUND_BYTES) * _ROUND_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            block = np.frombuffer(pages, dtype=np.uint8)
        lent = block[:size]
        # The tensor's storage holds `lent`, not `block`: when it goes, so do all views of it.
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)

    def _find(self, size: int) -> NDArray[np.uint8] | None:
        """The smallest free block that is large enough, but not one twice as large."""
        with self._lock:
            fitting = [
                i for i, block in enumerate(self._free) if size <= block.nbytes <= 2 * size + _ROUND_BYTES
            ]
            if not fitting:
                return None
            return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(block)
            if len(self._free) > _KEPT:
                del self._free[0]  # the one that has been of no use for longest
