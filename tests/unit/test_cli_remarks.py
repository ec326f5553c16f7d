"""What a stage says of itself in sentences, as `dflash run` and `dflash status` show it."""

from dflash.progress import Progress
from jobs.cli.view import figures, remarks


def test_the_verdict_an_early_stop_and_alerts_are_sentences_and_measured_acceptance_is_a_figure() -> None:
    progress = Progress(
        stage="training",
        alerts=["the store takes 12.0 s for a small request; check its load"],
        figures={
            "loss": 2.5,
            "acceptance_length": 2.1,
            "measured_acceptance_length": 1.02,
            "best_acceptance_length": 1.04,
            "verdict": "targets are the bottleneck",
            "early_stop": "ended early at step 30 of 100: ...",
        },
    )
    assert remarks(progress) == [
        "targets are the bottleneck",
        "ended early at step 30 of 100: ...",
        "alert: the store takes 12.0 s for a small request; check its load",
    ]
    assert "measured acceptance length 1.02, best acceptance length 1.04" in figures(progress)
    assert remarks(Progress(stage="generation")) == []
