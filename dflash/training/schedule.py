"""Learning rate and noise as pure functions of the step: nothing to save, nothing to resume wrongly."""

import math

from dflash.resource.training import Training


def learning_rate(training: Training, step: int, steps: int) -> float:
    """Rate of 0-based `step` of `steps`: linear warm-up to the peak, then a cosine to its last share.

    The first step trains at peak / warm-up steps, never at zero; the last at the minimum.
    """
    warmup = math.ceil(training.warmup * steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    floor = training.min_learning_rate_ratio
    return training.learning_rate * (floor + (1.0 - floor) * _cosine(step - warmup, steps - warmup))


def noise_std(training: Training, step: int, steps: int) -> float:
    """Std of the taps' noise, relative to their RMS, at a 0-based step: a cosine from start to end."""
    noise = training.noise
    return noise.end + (noise.start - noise.end) * _cosine(step, steps)


def _cosine(step: int, steps: int) -> float:
    """1 at the first step, 0 at the last, a half cosine between."""
    if steps <= 1:
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / (steps - 1))))
