"""Acceptance measured while training, with real processes: told, and decisive for export and end."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors.torch import load
from torch import Tensor

from dflash import layout
from dflash.model.checkpoint import load_export
from dflash.storage.commit import fetch_commit
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from dflash.tracking.jsonl import read_rows
from tests.support.measured import measured
from tests.support.tiny import save_tiny_target
from tests.support.training import TrainingRun

EVALUATION = {"everySteps": 2, "samples": 6, "maxTokens": 20, "waitSeconds": 60}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), layers=5)


def start(server: EmbeddedStore, store: Store, folder: Path, target: Path, **evaluation: Any) -> TrainingRun:
    training = {"checkpoint": {"everySteps": 4, "keep": 1}, "evaluation": {**EVALUATION, **evaluation}}
    return TrainingRun(server, store, folder, target=target, training=training, held_out=12, interval=1e-6)


def rows(run: TrainingRun) -> list[dict[str, Any]]:
    return read_rows(run.store.get(layout.drafter(run.run, "metrics.jsonl")))


def checkpoint(run: TrainingRun, step: int) -> dict[str, Tensor]:
    return load(run.store.get(layout.checkpoint(run.run, step, 0, "weights.safetensors")))


def assert_exported(run: TrainingRun, step: int, folder: Path) -> None:
    fetch_commit(run.store, layout.export(run.run), folder)
    drafter, _ = load_export(folder)
    for name, tensor in checkpoint(run, step).items():
        assert (drafter.state_dict()[name] == tensor.bfloat16().float()).all(), name


def test_checkpoints_are_measured_beside_training_and_the_best_is_exported(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with start(s3_server, store, tmp_path / "run", target) as run:
        serving = run.target(slow=0.3)
        (drafter,) = run.drafters()
        assert drafter.wait(120) == 0
        assert serving.wait() == 0
        found = [row for row in rows(run) if "eval/acceptance_length" in row]
        assert found[-1]["global_step"] == 12
        assert all(1.0 <= row["eval/acceptance_length"] <= 4.0 for row in found)
        assert all(row["eval/verifications"] >= 20 for row in found)
        best = max(found, key=lambda row: (row["eval/acceptance_length"], row["global_step"]))
        summary = run.summary()
        assert summary["exported_step"] == best["global_step"]
        assert [m["step"] for m in summary["measured"]] == [row["global_step"] for row in found]
        assert_exported(run, int(best["global_step"]), tmp_path / "export")
        heartbeat = run.heartbeat()
        assert heartbeat is not None
        assert heartbeat["figures"]["measured_step"] == 12.0
        assert heartbeat["figures"]["best_step"] == best["global_step"]
        # This target is slow on purpose: that is said once, and stays in sight.
        said = [row["event"] for row in rows(run) if "of the time for hidden" in str(row.get("event"))]
        assert len(said) == 1
        assert any("of the time for hidden" in alert for alert in heartbeat["alerts"])
        answers = store.get_json(layout.measured(run.run, "answers.json"))
        assert 1 <= len(answers) <= 6


def test_an_earlier_checkpoint_that_accepts_more_is_kept_and_exported(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with start(s3_server, store, tmp_path / "run", target) as run:
        # As if an attempt before had found the checkpoint of step 4 to be far better than any other.
        key = layout.measured(run.run, "step-00000004-a0.json")
        store.put(key, orjson.dumps(measured(4, 3.9).model_dump()))
        run.complete()
        summary = run.summary()
        assert (summary["steps"], summary["exported_step"]) == (12, 4)
        assert {"step-00000004-a0", "step-00000012-a0"} <= set(run.checkpoints())  # the best, and the newest
        assert_exported(run, 4, tmp_path / "export")


def test_low_acceptance_ends_the_whole_group_early_with_an_export_and_the_reason(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    stop = {"minAcceptanceLength": 4.0, "after": 0.1}
    with start(s3_server, store, tmp_path / "run", target, stop=stop) as run:
        serving = run.target(slow=0.5)
        group = run.drafters(world=2)
        assert [drafter.wait(120) for drafter in group] == [0, 0]
        assert serving.wait() == 0
        summary = run.summary()
        assert summary["steps"] < 12
        assert "below training.evaluation.stop.minAcceptanceLength 4" in summary["ended_early"]
        assert summary["ended_early"] in [row.get("event") for row in rows(run)]
        heartbeat = run.heartbeat()
        assert heartbeat is not None
        assert heartbeat["figures"]["early_stop"] == summary["ended_early"]
        assert fetch_commit(store, layout.export(run.run), tmp_path / "export").files
