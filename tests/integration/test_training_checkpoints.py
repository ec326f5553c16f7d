"""Checkpoints against a real S3 server: committed whole, resumed verified, fenced by attempt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import layout
from dflash.errors import ConfigurationError, DflashError, TemporaryError
from dflash.storage.commit import read_commit
from dflash.storage.store import Credentials, Store
from dflash.training.checkpoints import Checkpoints, Place

RUN = "abc"
IDENTITY = {"dataset": "d1", "seed": 3, "shape": {"taps": (1, 2)}}


def checkpoints(
    store: Store, attempt: int = 0, keep: int = 2, identity: Mapping[str, Any] = IDENTITY
) -> Checkpoints:
    return Checkpoints(store, RUN, attempt, keep=keep, identity=identity)


def save(saver: Checkpoints, step: int, value: float | None = None) -> None:
    # Views of one buffer, as the optimiser hands them over.
    flat = torch.full((12,), float(step) if value is None else value)
    weights = {"a": flat[:8].view(2, 4), "b": flat[8:]}
    moments = {"exp_avg.a": flat[:8].view(2, 4).clone(), "step": torch.tensor(float(step))}
    saver.save(step, {"samples": 8.0 * step}, weights, moments)
    saver.finish()


def commits(store: Store) -> list[str]:
    prefix = layout.drafter(RUN, "checkpoints/")
    return [info.key.removeprefix(prefix) for info in store.list(prefix) if info.key.endswith(layout.COMMIT)]


def test_a_run_without_checkpoints_starts_from_nothing(store: Store) -> None:
    saver = checkpoints(store)
    saver.claim()
    assert saver.restore() is None


def test_what_was_saved_is_restored(store: Store) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 10)
    restored = checkpoints(store, attempt=1).restore()
    assert restored is not None
    assert restored.place == Place(10, 0)
    assert restored.state.step == 10
    assert restored.state.counts == {"samples": 80.0}
    assert torch.equal(restored.weights["a"], torch.full((2, 4), 10.0))
    assert restored.moments["step"] == 10.0
    assert store.get_json(layout.latest(RUN))["step"] == 10


def test_the_newest_are_kept_and_the_rest_is_gone(store: Store) -> None:
    saver = checkpoints(store, keep=2)
    saver.claim()
    for step in (1, 2, 3, 4):
        save(saver, step)
    assert commits(store) == ["step-00000003-a0/COMMIT.json", "step-00000004-a0/COMMIT.json"]
    assert not list(store.list(layout.checkpoint(RUN, 1, 0)))


def test_what_a_killed_attempt_left_half_done_is_ignored_and_removed(store: Store) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 5)
    store.put(layout.checkpoint(RUN, 9, 0, "weights.safetensors"), b"half of it")
    later = checkpoints(store, attempt=1)
    later.claim()
    restored = later.restore()
    assert restored is not None
    assert restored.state.step == 5
    save(later, 6)
    assert not list(store.list(layout.checkpoint(RUN, 9, 0)))


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(store: Store, damage: str) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 1)
    save(saver, 2)
    key = layout.checkpoint(RUN, 2, 0, "weights.safetensors")
    if damage == "missing":
        store.delete(key)
    else:
        data = bytearray(store.get(key))
        data[-1] ^= 1
        store.put(key, bytes(data))
    restored = checkpoints(store, attempt=1).restore()
    assert restored is not None
    assert restored.state.step == 1


@pytest.mark.parametrize("latest", [b'{"attempt":0,"step":999,"folder":"nowhere/"}', None])
def test_latest_is_a_hint_and_not_trusted(store: Store, latest: bytes | None) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 3)
    if latest is None:
        store.delete(layout.latest(RUN))
    else:
        store.put(layout.latest(RUN), latest)
    restored = checkpoints(store, attempt=1).restore()
    assert restored is not None
    assert restored.state.step == 3


def test_another_declaration_is_refused_by_the_name_of_what_differs(store: Store) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 3)
    with pytest.raises(ConfigurationError, match="made with seed 3, but this run has 4"):
        checkpoints(store, attempt=1, identity={**IDENTITY, "seed": 4}).restore()


def test_weights_that_are_not_finite_are_never_saved(store: Store) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 1)
    with pytest.raises(DflashError, match="a is not finite after step 2"):
        save(saver, 2, value=float("nan"))
    assert commits(store) == ["step-00000001-a0/COMMIT.json"]


def test_an_attempt_that_was_taken_over_cannot_commit(store: Store) -> None:
    old = checkpoints(store, attempt=0)
    old.claim()
    save(old, 1)
    new = checkpoints(store, attempt=1)
    new.claim()
    with pytest.raises(TemporaryError, match="attempt 1 has taken over"):
        save(old, 2)
    assert commits(store) == ["step-00000001-a0/COMMIT.json"]
    with pytest.raises(TemporaryError, match="attempt 1 has taken over"):
        checkpoints(store, attempt=0).claim()


def test_an_attempt_taken_over_in_the_middle_of_a_commit_takes_it_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpoints(store, attempt=0)
    old.claim()
    new = checkpoints(store, attempt=1)
    check = old._check_fence

    def check_then_be_overtaken() -> None:
        check()
        monkeypatch.setattr(old, "_check_fence", lambda: None)  # the second check saw nothing yet
        new.claim()

    monkeypatch.setattr(old, "_check_fence", check_then_be_overtaken)
    with pytest.raises(TemporaryError, match="taken over"):
        save(old, 2)
    assert commits(store) == []
    assert new.restore() is None


def test_the_same_step_is_committed_once(store: Store) -> None:
    saver = checkpoints(store)
    saver.claim()
    save(saver, 4)
    before = read_commit(store, layout.checkpoint(RUN, 4, 0))
    save(saver, 4, value=7.0)
    assert read_commit(store, layout.checkpoint(RUN, 4, 0)) == before


def test_a_failing_upload_is_told_to_the_training_loop(store: Store, tmp_path: Path) -> None:
    saver = checkpoints(store)
    saver.claim()
    nowhere = store.location.model_copy(update={"endpoint": "http://127.0.0.1:9"})
    blocked = Store.open(nowhere, Credentials("key", "secret"), patience=0.5)
    saver._store = blocked
    saver.save(1, {}, {"a": torch.ones(1)}, {"step": torch.ones(())})
    with pytest.raises(DflashError):
        saver.finish()
    saver.check()  # told once
