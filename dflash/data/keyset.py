"""A set of 64-bit hashes in flat arrays: a million keys cost about 10 MB, not a hundred.

Open addressing with linear probing, in many small tables, so that growing copies one of them and never the
whole set at once. Used where a Python set of strings would make a worker's memory grow with the number of
prompts. No deletion, no iteration: nobody needs them.
"""

from array import array

_MASK64 = 2**64 - 1
_TABLES = 256
_FIRST_SLOTS = 8


class KeySet:
    """Adds and looks up 16-digit hexadecimal keys (or integers below 2**64).

    One thread may add while others look up.
    """

    def __init__(self) -> None:
        self._tables = [_empty(_FIRST_SLOTS) for _ in range(_TABLES)]  # 0 is a free slot
        self._used = [0] * _TABLES

    def __len__(self) -> int:
        return sum(self._used)

    def __contains__(self, key: str | int) -> bool:
        value = _value(key)
        mixed = _mixed(value)
        slots = self._tables[mixed % _TABLES]
        return slots[_slot_of(slots, value, mixed)] != 0

    def add(self, key: str | int) -> bool:
        """Put a key in; False when it was there already."""
        value = _value(key)
        mixed = _mixed(value)
        table = mixed % _TABLES
        slots = self._tables[table]
        slot = _slot_of(slots, value, mixed)
        if slots[slot]:
            return False
        slots[slot] = value
        self._used[table] += 1
        if self._used[table] * 5 > len(slots) * 4:
            self._grow(table)
        return True

    def _grow(self, table: int) -> None:
        old = self._tables[table]
        larger = _empty(len(old) + len(old) // 2)
        for value in old:
            if value:
                larger[_slot_of(larger, value, _mixed(value))] = value
        self._tables[table] = larger


def _empty(slots: int) -> "array[int]":
    return array("Q", bytes(8 * slots))


def _mixed(value: int) -> int:
    """Fibonacci hashing, so that keys which differ only in low or in high bits still spread."""
    return (value * 0x9E3779B97F4A7C15 & _MASK64) >> 20


def _slot_of(slots: "array[int]", value: int, mixed: int) -> int:
    """Where the value is, or the free slot where it would go."""
    size = len(slots)
    slot = mixed // _TABLES % size
    while slots[slot] and slots[slot] != value:
        slot = slot + 1 if slot + 1 < size else 0
    return slot


def _value(key: str | int) -> int:
    """The key as a non-zero integer: zero marks a free slot."""
    return (int(key, 16) if isinstance(key, str) else key) or 1
