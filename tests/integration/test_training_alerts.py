"""Alerts of real runs: one with a slow target says so; one in time does not."""

from pathlib import Path

import pytest

from dflash import layout
from dflash.planning.warm_up import WarmUp, settings_of
from dflash.resource.load import load_resource
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from dflash.tracking.jsonl import read_rows
from tests.support.tiny import save_tiny_target
from tests.support.training import TrainingRun


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), layers=5)


def foretell(run: TrainingRun, steps_per_second: float) -> None:
    """Write down what a warm-up would have measured."""
    warm_up = WarmUp(
        settings=settings_of(load_resource(run.resource_file).spec),
        device="CPU",
        answers=20,
        dropped_share=0,
        prompt_tokens=10,
        response_tokens=20,
        steps_per_second=steps_per_second,
    )
    run.store.put_json(layout.warm_up("tiny"), warm_up.model_dump(mode="json", by_alias=True))


def run_to_the_end(
    server: EmbeddedStore,
    store: Store,
    folder: Path,
    target: Path,
    *,
    steps_per_second: float,
    slow: float | None = None,
    **training: object,
) -> list[str]:
    """What it said was wrong."""
    training = {"epochs": 6, **training}
    with TrainingRun(
        server, store, folder, samples=24, target=target, training=training, interval=0.01
    ) as run:
        foretell(run, steps_per_second)
        target_process, (drafter,) = run.target(slow=slow), run.drafters()
        assert drafter.wait(200.0) == 0, drafter.said()[-4000:]
        target_process.wait(60.0)
        rows = read_rows(store.get(layout.drafter(run.run, "metrics.jsonl")))
    return [row["event"] for row in rows if "event" in row]


def test_a_run_in_time_raises_no_alert_of_its_schedule(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    said = run_to_the_end(s3_server, store, tmp_path, target, steps_per_second=0.02)
    # On a busy machine either side may wait long, and a random target teaches little: here the time is asked.
    assert not [text for text in said if "warm-up's rate" in text], said


def test_a_run_with_a_slow_target_says_that_it_is_late_and_starved(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    said = run_to_the_end(s3_server, store, tmp_path, target, steps_per_second=20.0, slow=0.3)
    for alert in (
        "at the warm-up's rate; see the bottleneck",
        "of the time for hidden states; add targets",
    ):
        assert [text for text in said if alert in text], f"{alert!r} is not in:\n" + "\n".join(said)
