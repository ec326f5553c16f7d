"""A worker's progress: its own share only, so that a reader adds up all workers' figures."""

import time
from collections import Counter, deque

from dflash.data.parts import histogram_bin
from dflash.engines.engine import EngineCounts
from dflash.generation.gate import EMPTY, REPEATING, Tally
from dflash.progress import Progress

_WINDOW_SECONDS = 60.0


class Meter:
    """Counts answers and gives rates over the last minute."""

    def __init__(self) -> None:
        self.prompts = 0
        self.tokens = 0
        self.histogram: Counter[str] = Counter()
        self._marks: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])

    def add(self, lengths: list[int]) -> None:
        """One prompt is answered, with samples of these supervised lengths."""
        self.prompts += 1
        self.tokens += sum(lengths)
        self.histogram.update(histogram_bin(length) for length in lengths)

    def rates(self) -> tuple[float, float]:
        """Prompts and tokens a second since a minute ago. Called once a report."""
        now = time.monotonic()
        self._marks.append((now, self.prompts, self.tokens))
        while len(self._marks) > 2 and self._marks[0][0] < now - _WINDOW_SECONDS:
            self._marks.popleft()
        since, prompts, tokens = self._marks[0]
        elapsed = max(now - since, 1e-6)
        return (self.prompts - prompts) / elapsed, (self.tokens - tokens) / elapsed


def progress(
    meter: Meter, tally: Tally, engine: EngineCounts, *, before: int, total: int, in_flight: int
) -> Progress:
    """A snapshot. `before`: prompts of this share that were done when the worker started."""
    rate, tokens = meter.rates()
    done = before + meter.prompts
    figures: dict[str, float | str] = {
        "tokens": meter.tokens,
        "tokens_per_second": round(tokens, 1),
        "in_flight": in_flight,
        "samples": tally.seen,
        "dropped_share": round(tally.share(), 4),
        "empty_share": round(tally.share(EMPTY), 4),
        "repetition_share": round(tally.share(REPEATING), 4),
        "retries": engine.retries,
        "restarts": engine.restarts,
        "histogram": " ".join(f"{key}:{meter.histogram[key]}" for key in sorted(meter.histogram, key=int)),
    }
    figures |= {f"dropped_{reason}": count for reason, count in sorted(tally.dropped.items())}
    return Progress(
        stage="generation",
        message="generating",
        done=done,
        total=total,
        unit="prompts",
        rate=round(rate, 3),
        eta_seconds=round((total - done) / rate, 1) if rate > 0 else None,
        updated_at=time.time(),
        figures=figures,
    )
