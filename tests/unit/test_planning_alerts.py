"""Each alert is raised by a series with its fault, and none by a healthy run."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.planning.alerts import Surroundings, alerts

WELL = Surroundings(
    dropped_share=0.03,
    checkpoint_age_seconds=400,
    checkpoint_every_seconds=600,
    store_seconds=0.05,
    elapsed_seconds=3700,
    planned_seconds=3600,
)


def healthy(rows=40, seed=0, first=0.15, last=0.75, noise=0.02):
    """A run as it should be: a loss that falls ever more slowly, under noise."""
    random_ = random.Random(seed)
    found = []
    for i in range(rows):
        share = first + (last - first) * i / max(1, rows - 1)
        learnt = 1 - 0.5 ** (6 * share)
        found.append(
            {
                "global_step": i,
                "progress/share": share,
                "progress/samples": 80.0 * i,
                "progress/skipped_steps": 0.0,
                "train/loss": 6 - 3.5 * learnt + random_.gauss(0, noise),
                "train/accuracy": 0.05 + 0.4 * learnt + random_.gauss(0, noise / 10),
                "train/acceptance_length": 1.2 + 2 * learnt + random_.gauss(0, noise),
                "drafter/wait_share": 0.05 + random_.random() / 20,
                "target/idle_share": 0.08 + random_.random() / 20,
                "channel/bad_replies": 0.0,
                "train/gradient_norm": 1.0 + random_.random() / 5,
            }
        )
    return found


def broken(name, values):
    """A healthy run in which one series is replaced: `values` gives the number for a row's index."""
    return [row | {name: values(i)} for i, row in enumerate(healthy())]


ROW_FAULTS = {
    "loss-not-falling": ("train/loss", lambda i: 5.0 + 0.01 * (-1) ** i),
    "accuracy-flat": ("train/accuracy", lambda i: 0.1 + 0.001 * (-1) ** i),
    "acceptance-at-one": ("train/acceptance_length", lambda i: 1.01 + 0.001 * i / 40),
    "targets-starved": ("target/idle_share", lambda _: 0.41),
    "drafters-starved": ("drafter/wait_share", lambda _: 0.5),
    "gradient-not-finite": ("progress/skipped_steps", float),
    "bad-replies": ("channel/bad_replies", lambda i: 2.0 * i),
    "gradient-exploding": ("train/gradient_norm", lambda i: 1.0 if i < 37 else 30.0 * (i - 36)),
}
FAULTS = {
    "drop-rate-up": {"dropped_share": 0.87},
    "checkpoints-not-committing": {"checkpoint_age_seconds": 3000},
    "store-slow": {"store_seconds": 12.0},
    "schedule-missed": {"elapsed_seconds": 7200},
}


@pytest.mark.parametrize("name", ROW_FAULTS)
def test_a_series_with_a_fault_raises_its_alert_and_no_other(name):
    found = alerts(broken(*ROW_FAULTS[name]), WELL)
    assert [alert.name for alert in found] == [name]


@pytest.mark.parametrize("name", FAULTS)
def test_surroundings_with_a_fault_raise_their_alert_and_no_other(name):
    found = alerts(healthy(), replace(WELL, **FAULTS[name]))
    assert [alert.name for alert in found] == [name]


@pytest.mark.parametrize("name", [*ROW_FAULTS, *FAULTS])
def test_an_alert_says_what_to_do(name):
    rows = broken(*ROW_FAULTS[name]) if name in ROW_FAULTS else healthy()
    sentence = alerts(rows, replace(WELL, **FAULTS.get(name, {})))[0].sentence
    assert ";" in sentence
    assert not sentence.endswith(".")


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 60),
    noise=st.floats(0, 0.05),
    first=st.floats(0, 0.9),
    span=st.floats(0, 0.6),
)
def test_no_window_of_a_healthy_run_raises_an_alert(seed, rows, noise, first, span):
    window = healthy(rows, seed, first, min(1.0, first + span), noise)
    assert alerts(window, WELL) == []


def test_warming_up_and_ending_raise_nothing():
    early = [row | {"train/loss": 11.0, "train/accuracy": 0.0} for row in healthy(last=0.09, first=0.0)]
    late = [row | {"train/loss": 3.0, "train/accuracy": 0.4} for row in healthy(first=0.85, last=1.0)]
    assert alerts(early, WELL) == alerts(late, WELL) == []


def test_what_is_not_known_raises_nothing():
    events = [{"global_step": 5, "event": "restart: attempt 1 goes on from step 5"}]
    assert alerts(events * 20) == []
    assert alerts([]) == []


def test_not_a_number_is_passed_over():
    assert alerts([row | {"train/loss": float("nan")} for row in healthy()], WELL) == []
