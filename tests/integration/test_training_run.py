"""Training end to end with real processes: a run's result does not depend on how it was computed."""

import signal
from pathlib import Path

import pytest
import torch

from dflash import layout
from dflash.model.checkpoint import load_export
from dflash.storage.commit import fetch_commit
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from dflash.tracking.jsonl import read_rows
from tests.support.tiny import save_tiny_target
from tests.support.training import TrainingRun

SAMPLES = 22
"""Not a multiple of the batch of 4: each epoch ends with a step of 2, in which some ranks have nothing."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), layers=5)


class Undisturbed:
    """Figures and weights of a run with one target and one drafter that nothing happened to."""

    def __init__(self, server: EmbeddedStore, folder: Path, target: Path) -> None:
        self.store = server.store(patience=10.0).under("undisturbed")
        with TrainingRun(server, self.store, folder, samples=SAMPLES, target=target) as run:
            run.complete()
            self.run = run
            self.weights = run.weights()
            self.summary = run.summary()

    def assert_same_result(self, run: TrainingRun) -> None:
        weights = run.weights()
        assert weights.keys() == self.weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor, self.weights[name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert run.summary()["steps"] == self.summary["steps"]
        counts, expected = run.summary()["counts"], self.summary["counts"]
        assert counts["samples"] == expected["samples"] == 2 * SAMPLES
        assert counts["tokens"] == expected["tokens"]


@pytest.fixture(scope="module")
def undisturbed(
    s3_server: EmbeddedStore, tmp_path_factory: pytest.TempPathFactory, target: Path
) -> Undisturbed:
    return Undisturbed(s3_server, tmp_path_factory.mktemp("undisturbed"), target)


def start(server: EmbeddedStore, store: Store, folder: Path, target: Path, **training: object) -> TrainingRun:
    return TrainingRun(server, store, folder, samples=SAMPLES, target=target, training=training)


def test_a_run_ends_with_an_export_its_metrics_and_a_done_heartbeat(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = undisturbed.run
    commit = fetch_commit(run.store, layout.export(run.run), tmp_path)
    drafter, shape = load_export(tmp_path)
    assert shape.taps == (1, 3)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(tensor, undisturbed.weights[name].bfloat16().float())
    assert commit.extra["steps"] == 12
    heartbeat = run.heartbeat()
    assert heartbeat is not None
    assert (heartbeat["done"], heartbeat["total"], heartbeat["unit"]) == (12.0, 12.0, "steps")
    assert {"loss", "accuracy", "acceptance_length", "learning_rate", "noise_std"} <= heartbeat[
        "figures"
    ].keys()
    rows = read_rows(run.store.get(layout.drafter(run.run, "metrics.jsonl")))
    last = [row for row in rows if "event" not in row][-1]
    assert last["global_step"] == 12
    assert {
        "train/loss",
        "target/samples_per_second",
        "drafter/tokens_per_second",
        "channel/depth",
    } <= last.keys()
    assert run.checkpoints()[-1] == "step-00000012-a0"  # others only where the upload before was done


@pytest.mark.parametrize(("targets", "drafters"), [(3, 1), (1, 2), (2, 2), (2, 3)])
def test_numbers_of_targets_and_drafters_do_not_change_the_result(
    s3_server: EmbeddedStore,
    store: Store,
    tmp_path: Path,
    target: Path,
    undisturbed: Undisturbed,
    targets: int,
    drafters: int,
) -> None:
    with start(s3_server, store, tmp_path, target) as run:
        run.complete(targets, drafters)
        undisturbed.assert_same_result(run)


def test_a_killed_drafter_is_resumed_by_the_next_attempt_while_the_target_stays(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path, undisturbed: Undisturbed
) -> None:
    with start(s3_server, store, tmp_path, target, checkpoint={"everySteps": 2}) as run:
        serving = run.target(slow=0.15)
        (first,) = run.drafters(attempt=0)
        run.wait_for_checkpoint()
        first.send(signal.SIGKILL)
        first.wait()
        (second,) = run.drafters(attempt=1)
        assert second.wait() == 0
        assert "resumed from" in second.said()
        assert serving.wait() == 0
        assert serving.said().count("agree to a cosine") == 1  # loaded once
        undisturbed.assert_same_result(run)


def test_a_killed_rank_ends_the_group_and_the_next_attempt_resumes_with_another_size(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path, undisturbed: Undisturbed
) -> None:
    with start(s3_server, store, tmp_path, target, checkpoint={"everySteps": 2}) as run:
        serving = run.target(slow=0.15)
        first = run.drafters(world=2, attempt=0)
        run.wait_for_checkpoint()
        first[1].send(signal.SIGKILL)
        assert first[0].wait(40) == 75
        (again,) = run.drafters(world=1, attempt=1)
        assert again.wait() == 0
        assert serving.wait() == 0
        undisturbed.assert_same_result(run)


def test_a_killed_target_is_survived(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path, undisturbed: Undisturbed
) -> None:
    with start(s3_server, store, tmp_path, target) as run:
        doomed, other = run.target(0, slow=0.15), run.target(1, slow=0.15)
        (drafter,) = run.drafters()
        run.wait_for_checkpoint()
        doomed.send(signal.SIGKILL)
        assert drafter.wait() == 0
        assert other.wait() == 0
        undisturbed.assert_same_result(run)


@pytest.mark.parametrize("world", [1, 2])
def test_asked_to_stop_a_group_commits_and_ends_with_143_and_goes_on_later(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path, undisturbed: Undisturbed, world: int
) -> None:
    with start(s3_server, store, tmp_path, target, checkpoint={"everySteps": 1000}) as run:
        serving = run.target(slow=0.5)
        group = run.drafters(world=world, attempt=0)
        run.wait_for_step(2)
        group[-1].send(signal.SIGTERM)  # one rank is told; all stop
        assert [drafter.wait(10) for drafter in group] == [143] * world
        assert len(run.checkpoints()) == 1
        assert all(drafter.wait() == 0 for drafter in run.drafters(world=world, attempt=1))
        assert serving.wait() == 0
        undisturbed.assert_same_result(run)


def test_asked_to_stop_while_there_is_no_target_it_still_ends_in_time(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with start(s3_server, store, tmp_path, target) as run:
        group = run.drafters(world=2)
        for drafter in group:
            drafter.wait_for("step 0 of 12")
        group[0].send(signal.SIGTERM)
        assert [drafter.wait(10) for drafter in group] == [143, 143]


def test_a_target_asked_to_stop_ends_with_143(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path, target: Path
) -> None:
    with start(s3_server, store, tmp_path, target) as run:
        serving = run.target()
        serving.wait_for("serves on")
        serving.send(signal.SIGTERM)
        assert serving.wait(10) == 143


def test_a_run_that_is_exported_is_left_alone(undisturbed: Undisturbed) -> None:
    with undisturbed.run as run:
        before = run.summary()
        (again,) = run.drafters(attempt=5)
        assert again.wait() == 0
        assert run.target().wait() == 0
        assert run.summary() == before
