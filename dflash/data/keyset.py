"""A set of 64-bit hashes in one flat array: a million keys cost 16 MB, not a hundred.

Open addressing with linear probing over `array('Q')`. Used where a Python set of strings would make a
worker's memory grow with the number of prompts. No deletion, no iteration: nobody needs them.
"""

from array import array

_MASK64 = 2**64 - 1


class KeySet:
    """Adds and looks up 16-digit hexadecimal keys (or integers below 2**64)."""

    def __init__(self, capacity: int = 1024) -> None:
        self._mask = max(8, 1 << (capacity - 1).bit_length()) - 1
        self._slots = array("Q", bytes(8 * (self._mask + 1)))
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def __contains__(self, key: str | int) -> bool:
        value = _value(key)
        slots, mask = self._slots, self._mask
        slot = _spread(value) & mask
        while slots[slot]:
            if slots[slot] == value:
                return True
            slot = (slot + 1) & mask
        return False

    def add(self, key: str | int) -> bool:
        """Put a key in; False when it was there already."""
        value = _value(key)
        slots, mask = self._slots, self._mask
        slot = _spread(value) & mask
        while slots[slot]:
            if slots[slot] == value:
                return False
            slot = (slot + 1) & mask
        slots[slot] = value
        self._used += 1
        if self._used * 4 > (mask + 1) * 3:
            self._grow()
        return True

    def _grow(self) -> None:
        old = self._slots
        self._mask = 2 * self._mask + 1
        self._slots = array("Q", bytes(8 * (self._mask + 1)))
        slots, mask = self._slots, self._mask
        for value in old:
            if value:
                slot = _spread(value) & mask
                while slots[slot]:
                    slot = (slot + 1) & mask
                slots[slot] = value


def _value(key: str | int) -> int:
    """The key as a non-zero integer: zero marks a free slot."""
    return (int(key, 16) if isinstance(key, str) else key) or 1


def _spread(value: int) -> int:
    """Fibonacci hashing, so that keys which differ only in low or high bits still spread."""
    return ((value * 0x9E3779B97F4A7C15) & _MASK64) >> 20
