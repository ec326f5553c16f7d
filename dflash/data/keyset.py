"""A set of 64-bit hashes in one flat array: a million keys cost 16 MB, not a hundred.

Open addressing with linear probing over `array('Q')`. Used where a Python set of strings would make a
worker's memory grow with the number of prompts. No deletion, no iteration: nobody needs them.
"""

from array import array

_MASK64 = 2**64 - 1
_FIRST_SLOTS = 1024


class KeySet:
    """Adds and looks up 16-digit hexadecimal keys (or integers below 2**64).

    One thread may add while others look up.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _FIRST_SLOTS))  # a power of two; 0 is a free slot
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def __contains__(self, key: str | int) -> bool:
        slots = self._slots
        return slots[_slot_of(slots, _value(key))] != 0

    def add(self, key: str | int) -> bool:
        """Put a key in; False when it was there already."""
        value = _value(key)
        slot = _slot_of(self._slots, value)
        if self._slots[slot]:
            return False
        self._slots[slot] = value
        self._used += 1
        if self._used * 4 > len(self._slots) * 3:
            self._grow()
        return True

    def _grow(self) -> None:
        larger = array("Q", bytes(16 * len(self._slots)))
        for value in self._slots:
            if value:
                larger[_slot_of(larger, value)] = value
        self._slots = larger


def _slot_of(slots: "array[int]", value: int) -> int:
    """Where the value is, or the free slot where it would go."""
    mask = len(slots) - 1
    # Fibonacci hashing, so that keys which differ only in low or in high bits still spread.
    slot = ((value * 0x9E3779B97F4A7C15 & _MASK64) >> 20) & mask
    while slots[slot] and slots[slot] != value:
        slot = (slot + 1) & mask
    return slot


def _value(key: str | int) -> int:
    """The key as a non-zero integer: zero marks a free slot."""
    return (int(key, 16) if isinstance(key, str) else key) or 1
