"""Learning rate and noise over a run."""

from itertools import pairwise

import pytest

from dflash.resource.training import Noise, Training
from dflash.training.schedule import learning_rate, noise_std

TRAINING = Training(
    learning_rate=1.0, warmup=0.1, min_learning_rate_ratio=0.2, noise=Noise(start=0.5, end=0.1)
)


def test_the_rate_warms_up_once_and_falls_to_its_minimum() -> None:
    rates = [learning_rate(TRAINING, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2)


def test_noise_falls_by_a_cosine_from_start_to_end() -> None:
    levels = [noise_std(TRAINING, step, 101) for step in range(101)]
    assert levels[0] == 0.5
    assert levels[50] == pytest.approx(0.3)
    assert levels[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(levels))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_tiny_runs_have_rates_above_zero(steps: int) -> None:
    training = Training(warmup=0.5)
    assert learning_rate(training, 0, steps) > 0
    assert noise_std(training, 0, steps) == training.noise.start


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(Training(warmup=0.0, learning_rate=0.5), 0, 10) == 0.5
