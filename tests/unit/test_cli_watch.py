"""The terminal view: curves are curves, and everything that matters is on the screen."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from dflash.errors import ConfigurationError
from dflash.progress import Progress
from jobs.cli import app
from jobs.cli.watch import picture, sparkline
from tests.unit.test_resource_load import GOOD


def test_a_curve_goes_as_its_values_go():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([]) == ""


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=500), st.integers(1, 80))
def test_a_curve_fits_its_width_and_has_its_ends(values, width):
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))


def state(**more):
    progress = Progress(
        stage="training",
        done=40,
        total=100,
        unit="steps",
        rate=2,
        eta_seconds=30,
        figures={
            "loss": 2.5,
            "verdict": "targets are the bottleneck: drafters wait 40 %",
            "queue_depth": 3.0,
        },
        alerts=["drafters wait 40% of the time for hidden states; add targets"],
    )
    stages = [
        {"name": "generation", "state": "done", "hash": "d", "progress": None},
        {"name": "training", "state": "running", "hash": "r", "progress": progress.model_dump(by_alias=True)},
        {"name": "evaluation", "state": "waiting", "hash": "e", "progress": None},
    ]
    return {
        "name": "tiny",
        "phase": "training",
        "stages": stages,
        "costSentences": ["spent 2 GPU-hours"],
        **more,
    }


ROWS = [
    {
        "global_step": i,
        "time": 1_800_000_000.0 + i,
        "train/loss": 5.0 - i / 20,
        "train/accuracy": i / 100,
        "channel/depth": 3.0,
    }
    for i in range(40)
]


def shown(*arguments) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(picture(*arguments))
    return console.file.getvalue()


def test_stage_curves_verdict_alerts_cost_and_events_are_on_the_screen():
    text = shown(
        state(), [*ROWS, {"global_step": 40, "time": 1_800_000_100.0, "event": "restart: attempt 1"}]
    )
    for told in (
        "tiny: training",
        "40/100 steps (40 %)",
        "loss",
        "█",
        "queue depth",
        "targets are the bottleneck",
        "alert: drafters wait 40%",
        "spent 2 GPU-hours",
        "step 40: restart: attempt 1",
    ):
        assert told in text


def test_before_training_there_is_no_curve():
    assert "▁" not in shown(state(), [])


def test_a_drafter_that_was_never_run_is_told(tmp_path):
    file = tmp_path / "drafter.yaml"
    file.write_text(GOOD)
    with pytest.raises(ConfigurationError, match="was never run here; start it with: dflash run"):
        CliRunner().invoke(app, ["watch", "--once", str(file)], catch_exceptions=False)
