"""Loops in token ids: found in linear time with numpy, so that every answer can be looked at.

Two measures. A *tail period*: the answer ends in p tokens said again and again. *Heavy n-grams*: 8-grams
that occur at least four times; where a window or the whole answer consists of them, it goes round in
circles, also with small changes from round to round. Saying something twice or three times (code in the
thinking and again in the answer) is not heavy. Nothing here knows text or tools.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.data.rows import Ids

GRAM = 8
HEAVY = 4
"""Occurrences that make an n-gram heavy."""
WINDOW = 512
_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_DOUBLINGS = [
    (1, np.uint64(0xD1342543DE82EF95)),
    (2, np.uint64(0xD1342543DE82EF95**2 % 2**64)),
    (4, np.uint64(0xD1342543DE82EF95**4 % 2**64)),
]
"""Width of the n-grams so far, and what their first half is multiplied by."""
_NO_HASHES = np.zeros(0, np.uint64)

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Repetition:
    """How much of an answer repeats itself; shares are of its tokens."""

    period: int
    """Tokens in one round of the loop at the end; 0 without one."""
    run: int
    """Tokens in that loop, all rounds together."""
    heavy_share: float
    """Share of n-grams that are heavy."""
    heavy_window: float
    """The same in the worst stretch of `WINDOW` tokens."""


def measure(ids: Ids) -> Repetition:
    """Look for loops in an answer's ids, its end-of-turn token left out. O(length) time and memory."""
    hashes = _gram_hashes(ids)
    period, run = tail_period(ids, hashes)
    share, window = _heavy(hashes)
    return Repetition(period, run, share, window)


def degenerate(found: Repetition, length: int, *, cut: bool) -> bool:
    """Whether an answer of `length` tokens is a loop rather than an answer; `cut` when it did not end itself.

    An answer cut in a loop never got out of it. One that ended may close with something periodic (a
    table's rule, a row of dots), so there the loop must make up a fifth of it.
    """
    long_enough = found.run >= max(3 * found.period, min(64, max(24, length // 2)))
    looping = found.period > 0 and long_enough and (cut or 5 * found.run >= length)
    circling = length >= 4 * GRAM and (
        found.heavy_share >= 0.5 or (length >= WINDOW and found.heavy_window >= 0.9)
    )
    return looping or circling


def tail_period(ids: Ids, hashes: Hashes) -> tuple[int, int]:
    """(p, run): the last `run` tokens have period p and hold at least two rounds; (0, 0) if none do.

    The period is the distance from the last token, or the last n-gram, to its previous occurrence: if the
    tail has a period of n tokens or more, it is that one. The longer run of the two is taken.
    """
    best = (0, 0)
    for places, last in ((ids, len(ids) - 1), (hashes, len(hashes) - 1)):
        if last < 0:
            break
        starts = (places[:last] == places[last]).nonzero()[0]
        if len(starts) == 0:
            continue
        period = last - int(starts[-1])
        if 2 * period > len(ids) or not (ids[-period:] == ids[-2 * period : -period]).all():
            continue  # what nearly every answer comes to
        run = _trailing_run(ids, period)
        if run > best[1]:
            best = (period, run)
    return best


def _trailing_run(ids: Ids, period: int) -> int:
    """Length of the longest suffix with this period."""
    broken = (ids[period:] != ids[:-period]).nonzero()[0]
    matched = len(ids) - period - (int(broken[-1]) + 1 if len(broken) else 0)
    return matched + period


def _heavy(hashes: Hashes) -> tuple[float, float]:
    grams = len(hashes)
    if grams < 2 * GRAM:
        return 0.0, 0.0
    # Counted in a table of four to eight places a gram, by the hash's upper bits. Different grams that share
    # a place by chance raise its count, but four of them seldom meet, far below the shares that matter.
    bits = grams.bit_length() + 2
    places = (hashes >> np.uint64(64 - bits)).view(np.int64)
    heavy = (np.bincount(places) >= HEAVY)[places]
    total = int(np.count_nonzero(heavy))
    share = total / grams
    if grams <= WINDOW or total == 0:
        return share, share
    sums = np.cumsum(heavy)
    worst = int(np.max(sums[WINDOW:] - sums[:-WINDOW]))
    return share, worst / WINDOW


def _gram_hashes(ids: Ids) -> Hashes:
    """Hash of every n-gram, its upper bits the best: a sum of ids times odd numbers, by doubling."""
    if len(ids) < GRAM:
        return _NO_HASHES
    hashes = (ids.astype(np.uint64) + np.uint64(1)) * _TOKEN
    for width, multiplier in _DOUBLINGS:
        first = hashes[:-width] * multiplier
        first += hashes[width:]
        hashes = first
    return hashes
