"""The quality gate's speed on one core: tokens judged a second, and whether loops or length make it slower.

Judges a mix of ordinary answers and loops of 512 to 32,768 tokens, in CPU time, so that what else runs on
the machine does not count. `loop_cost_ratio` is the time of a token in a 32,768-token loop over that in a
1,024-token loop, measured in turns in one run: 1 or less is linear.
"""

import statistics
import time

import numpy as np

from dflash.data.render import Thinking
from dflash.generation.gate import Answer, Judge, Limits
from dflash.resource.generation import Gate

_NO_THINKING = Thinking(None, closed=True)


def run(quick: bool) -> dict[str, float]:
    """`tokens_per_s` over the mix, `loop_cost_ratio`."""
    generator = np.random.default_rng(0)
    judge = Judge(Limits.of(Gate(), 16), lambda ids: "text", lambda ids: "text", [151_657])

    def ordinary(length: int) -> np.ndarray:
        return (50_000 * generator.random(length) ** 3).astype(np.int32)  # a skewed vocabulary, as text has

    def loop(length: int) -> np.ndarray:
        return np.resize(ordinary(40), length)

    mix = [ordinary(n) for n in (512, 512, 2048, 8192)] * 4 + [loop(n) for n in (512, 2048, 8192, 32_768)]

    def seconds_a_token(answers: list[np.ndarray], repeats: int) -> float:
        began = time.thread_time()
        for _ in range(repeats):
            for ids in answers:
                judge.reason(Answer(ids, "length", _NO_THINKING))
        return (time.thread_time() - began) / repeats / sum(len(ids) for ids in answers)

    short, long = [loop(1024) for _ in range(64)], [loop(32_768) for _ in range(2)]
    rounds = 3 if quick else 15
    speeds, ratios = [], []
    for _ in range(rounds):
        speeds.append(1 / seconds_a_token(mix, 2 if quick else 8))
        ratios.append(seconds_a_token(long, 4) / seconds_a_token(short, 4))
    return {"tokens_per_s": statistics.median(speeds), "loop_cost_ratio": statistics.median(ratios)}
