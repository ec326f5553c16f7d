"""Which sample is trained when: a pure function of (seed, epoch, step, rank), with no state to save.

An epoch's order is a keyed permutation of the dataset, computed place by place (a small Feistel
network walked along its cycles), so it needs no memory, and a resumed run finds its place from the
step number alone. A step takes `batch_size` consecutive places of the epoch's order, and an epoch's
last step takes what is left. Of a step, rank r of R trains every R-th place, so the global batch is
the same for any number of drafters. In an epoch's last step a rank may have nothing to train.

Not for: reading samples (`dflash.training.samples`), or drawing anchors and noise
(`dflash.objective`), which depend on (seed, epoch, sample id) alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Permutation:
    """A pseudo-random permutation of range(size) that depends on (seed, epoch), in O(1) memory."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self._size = size
        # A balanced network works on an even number of bits: the smallest that holds every index.
        # Its domain is below 4 times the size, so walking back into range takes under 4 turns on average.
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half, self._low = half, (1 << half) - 1
        key = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
        extra = hashlib.sha256(key).digest()
        words = key + extra
        self._keys = [int.from_bytes(words[8 * i : 8 * i + 8], "big") for i in range(_ROUNDS)]

    def __call__(self, place: int) -> int:
        """The index at a place of the order."""
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} is outside an order of {self._size}")
        index = self._shuffle(place)
        while index >= self._size:
            index = self._shuffle(index)
        return index

    def _shuffle(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return left << self._half | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Place:
    """One sample of a step."""

    index: int
    """Running number over the whole run: step * batch_size + place in the step."""
    epoch: int
    sample: int
    """Index in the dataset."""


@dataclass(frozen=True)
class Order:
    """The whole run's schedule of samples."""

    samples: int
    batch_size: int
    epochs: int
    seed: int

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimiser steps an epoch, the partial last one included."""
        return -(-self.samples // self.batch_size)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run: the same number on every rank."""
        return self.epochs * self.steps_per_epoch

    @cached_property
    def _permutations(self) -> dict[int, Permutation]:
        return {}

    def step(self, step: int, rank: int = 0, world: int = 1) -> list[Place]:
        """What a rank trains in a step, in order; empty when an epoch's last step is too small for it."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside a run of {self.steps} steps")
        epoch, within = divmod(step, self.steps_per_epoch)
        permutation = self._permutations.get(epoch)
        if permutation is None:
            permutation = self._permutations.setdefault(epoch, Permutation(self.samples, self.seed, epoch))
        first = within * self.batch_size
        last = min(first + self.batch_size, self.samples)
        return [
            Place(step * self.batch_size + place - first, epoch, permutation(place))
            for place in range(first + rank, last, world)
        ]

    def from_step(self, step: int, rank: int = 0, world: int = 1) -> Iterator[tuple[int, list[Place]]]:
        """(step, what the rank trains in it) from a step to the end of the run."""
        for later in range(step, self.steps):
            yield later, self.step(later, rank, world)
