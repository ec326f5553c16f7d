"""Metrics reach metrics.jsonl and W&B's own files; nothing that happens to W&B stops the work."""

import logging
import socket
import sys
import time
from pathlib import Path

import orjson
import pytest

from dflash.resource.storage import Tracking, Wandb
from dflash.tracking import Tracker, wandb_run
from tests.support import wandb_file

HASH = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def opened(folder: Path, *, mode: str = "offline", **kwargs: int) -> Tracker:
    spec = Tracking(wandb=Wandb(project="tests", mode=mode))
    return Tracker.open(
        spec, name="qwen", run_hash=HASH, config={"training": {"epochs": 3}}, folder=folder, **kwargs
    )


def rows(folder: Path) -> list[dict]:
    return [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def test_what_is_logged_is_in_both_and_a_resumed_attempt_is_the_same_run(tmp_path: Path) -> None:
    with opened(tmp_path) as tracker:
        for step in (10, 20, 30):
            tracker.log(step, {"train/loss": 4.0 - step / 10, "train/learning_rate": 1e-3})
        tracker.event("early stop")
    (first,) = wandb_files(tmp_path)
    assert wandb_file.run(first).run_id == f"dflash-{HASH}"
    assert wandb_file.run(first).display_name == "qwen-01234567"
    assert {i.key: i.value_json for i in wandb_file.run(first).config.update}["training"] == '{"epochs":3}'
    history = wandb_file.history(first)
    assert [r["global_step"] for r in history] == [10, 20, 30, 30]
    assert [r["train/loss"] for r in history[:3]] == [3.0, 2.0, 1.0]
    assert history[3]["event"] == "early stop"
    assert wandb_file.metrics(first)["*"] == "global_step"

    time.sleep(1.1)  # W&B names its folders by the second
    with opened(tmp_path, attempt=1, step=20) as tracker:
        tracker.log(30, {"train/loss": 0.9})
    assert [(r["global_step"], r["attempt"]) for r in rows(tmp_path)] == [(10, 0), (20, 0), (20, 1), (30, 1)]
    assert "restart" in rows(tmp_path)[2]["event"]
    second = wandb_files(tmp_path)[1]
    assert wandb_file.run(second).run_id == f"dflash-{HASH}"
    # The later folder alone has the whole curve, so that syncing it loses nothing.
    assert [r["global_step"] for r in wandb_file.history(second)] == [10, 20, 20, 30]


def test_without_a_key_it_runs_offline_says_so_once_and_never_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a person"))
    with caplog.at_level(logging.INFO), opened(tmp_path, mode="online") as tracker:
        tracker.log(1, {"train/loss": 1.0})
    assert len([r for r in caplog.records if "WANDB_API_KEY" in r.message]) == 1
    (file,) = wandb_files(tmp_path)
    assert [r["train/loss"] for r in wandb_file.history(file)] == [1.0]
    assert any(f"wandb sync {file.parent}" in r.message for r in caplog.records)


def test_a_key_with_a_trailing_newline_is_tidied(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40 + "\n")
    assert wandb_run._has_key()
    assert os.environ["WANDB_API_KEY"] == "a" * 40
    monkeypatch.setenv("WANDB_API_KEY", "\n")
    assert not wandb_run._has_key()


def test_a_server_that_never_answers_neither_delays_nor_ends_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setattr(wandb_run, "INIT_SECONDS", 4.0)
        started = time.monotonic()
        tracker = opened(tmp_path, mode="online")
        tracker.log(1, {"train/loss": 1.0})
        assert time.monotonic() - started < 2.0
        tracker.finish()
    assert rows(tmp_path)[0]["train/loss"] == 1.0
    assert len([r for r in caplog.records if "cannot be reached" in r.message]) == 1
    (offline,) = wandb_files(tmp_path)
    assert [r["train/loss"] for r in wandb_file.history(offline)] == [1.0]


def test_without_the_package_metrics_still_go_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with opened(tmp_path) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        tracker.log(2, {"train/loss": float("nan")})
    assert [r["train/loss"] for r in rows(tmp_path)] == [1.0, None]
    assert len([r for r in caplog.records if "not installed" in r.message]) == 1


def test_disabled_means_the_file_only(tmp_path: Path) -> None:
    spec = Tracking(wandb=Wandb(enabled=False))
    with Tracker.open(spec, name="q", run_hash=HASH, config={}, folder=tmp_path) as tracker:
        tracker.log(1, {"train/loss": 1.0})
    assert not (tmp_path / "wandb").exists()
    assert len(rows(tmp_path)) == 1
