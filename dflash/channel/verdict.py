"""Which side limits a run, in one sentence: from the shares of time in which each side had to wait.

Pure arithmetic on measured shares. Capacity is taken to grow in proportion to the number of processes,
which holds as long as the network does not limit; the sentence says "about" for that reason.
"""

import math
from dataclasses import dataclass
from typing import Literal

_BUSY = 0.10
"""A side that waits less than this is busy enough to be what limits."""
_WORTH = 1.05
"""A gain below this is not worth a change."""

_SPARE = 1.15
"""Capacity of targets, over what the drafters use, that is kept when there are fewer of them."""

Bottleneck = Literal["targets", "drafters", "balanced", "channel", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """What limits, and which split of the processes would be better (the present one if none is)."""

    bottleneck: Bottleneck
    sentence: str
    targets: int
    drafters: int
    gain: float = 1.0


def judge(targets: int, drafters: int, target_idle: float | None, drafter_wait: float | None) -> Verdict:
    """From numbers of processes and the mean share of time each side waits (0 to 1; None: unknown yet)."""
    if target_idle is None or drafter_wait is None or targets < 1 or drafters < 1:
        return Verdict("unknown", "not measured yet which side limits", targets, drafters)
    if target_idle < _BUSY and drafter_wait < _BUSY:
        waits = f"targets idle {_percent(target_idle)}, drafters wait {_percent(drafter_wait)}"
        return Verdict("balanced", f"targets and drafters are balanced: {waits}", targets, drafters)
    if min(target_idle, drafter_wait) >= 2 * _BUSY:
        sentence = (
            f"neither side is the bottleneck: targets idle {_percent(target_idle)} and drafters wait "
            f"{_percent(drafter_wait)}; the network or the window limits: raise training.queueDepth, or look "
            "at bytes/s"
        )
        return Verdict("channel", sentence, targets, drafters)
    if target_idle >= drafter_wait:
        bottleneck: Bottleneck = "drafters"
        sentence = f"drafters are the bottleneck: targets idle {_percent(target_idle)}"
    else:
        bottleneck = "targets"
        sentence = f"targets are the bottleneck: drafters wait {_percent(drafter_wait)}"
    best = _best_split(targets, drafters, target_idle, drafter_wait)
    if best[2] >= _WORTH:
        sentence += f"; a {best[0]}:{best[1]} split would give about {best[2]:.1f}×"
        return Verdict(bottleneck, sentence, *best)
    more = (targets + 1, drafters) if bottleneck == "targets" else (targets, drafters + 1)
    gain = _gain(more[0] / targets, more[1] / drafters, target_idle, drafter_wait)
    if gain >= _WORTH:
        sentence += f"; one more {bottleneck[:-1]} ({more[0]}:{more[1]}) would give about {gain:.1f}×"
    return Verdict(bottleneck, sentence, targets, drafters)


def wanted_targets(targets: int, target_idle: float | None, drafter_wait: float | None) -> int:
    """Targets that would keep these drafters at work without idling: what `targets: auto` follows.

    The present number while it is not known, or while both sides wait or neither does. Fewer only with
    room to spare, so that the next measurement does not ask for them back.
    """
    if target_idle is None or drafter_wait is None or targets < 1:
        return targets
    needed = targets * (1.0 - target_idle) / max(1e-3, 1.0 - drafter_wait)
    if drafter_wait >= _BUSY and target_idle < _BUSY:
        return min(math.ceil(needed), 2 * targets)
    if target_idle >= _BUSY and drafter_wait < _BUSY:
        return max(1, min(targets, math.ceil(_SPARE * needed)))
    return targets


def _best_split(targets: int, drafters: int, idle: float, wait: float) -> tuple[int, int, float]:
    """The split of as many processes that would be fastest; of equals, the one nearest to the present."""
    total = targets + drafters
    splits = [
        (new, total - new, _gain(new / targets, (total - new) / drafters, idle, wait))
        for new in range(1, total)
    ]
    return max(splits, key=lambda split: (split[2], -abs(split[0] - targets)))


def _gain(targets_factor: float, drafters_factor: float, idle: float, wait: float) -> float:
    """Rate against the present: the lesser of what each side could do if it never waited."""
    return min(targets_factor / max(1e-3, 1.0 - idle), drafters_factor / max(1e-3, 1.0 - wait))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
