"""Whether two engines' figures of one drafter could be of one acceptance."""

import math
from collections.abc import Sequence

from dflash.evaluation.acceptance import AcceptanceLength

Z_99_9 = 3.3


def within_joint_interval(a: AcceptanceLength, b: AcceptanceLength) -> bool:
    """Whether the difference of both pooled lengths is inside its 95 % interval."""
    assert a.pooled_interval is not None
    assert b.pooled_interval is not None
    joint = math.hypot(a.pooled_interval.high - a.pooled, b.pooled_interval.high - b.pooled)
    return abs(a.pooled - b.pooled) <= joint


def within_sampling_error(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether both histograms could be draws from one distribution: each bin's shares, by two-sample z."""
    most, mine, theirs = 0.0, sum(a), sum(b)
    for x, y in zip(a, b, strict=True):
        share = (x + y) / (mine + theirs)
        error = math.sqrt(share * (1 - share) * (1 / mine + 1 / theirs))
        most = max(most, abs(x / mine - y / theirs) / error if error else 0.0)
    return most <= Z_99_9
