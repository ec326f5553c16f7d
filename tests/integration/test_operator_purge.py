"""Deleting what a Drafter has made, from a real S3 server, and nothing else."""

import pytest

from dflash import layout
from dflash.errors import ConfigurationError
from dflash.storage.store import Store
from operators.owner import claim
from operators.purge import purge

MADE = [
    layout.dataset("d" * 16, "inputs.json"),
    layout.dataset("d" * 16, "parts/x.parquet"),
    layout.dataset_manifest("d" * 16),
    layout.checkpoint("r" * 16, 3, 0, "model.safetensors"),
    layout.checkpoint("r" * 16, 3, 0, layout.COMMIT),
    layout.export("r" * 16, layout.COMMIT),
    layout.export("r" * 16, "model.safetensors"),
    layout.report("e" * 16),
    layout.promoted("mine"),
    layout.record("mine"),
]
FOREIGN = "prompts/questions.jsonl"


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list()}


@pytest.fixture
def made(store: Store) -> Store:
    claim(store, "mine", "here/mine", "Drafter mine")
    for key in [*MADE, FOREIGN]:
        store.put(key, b"{}")
    return store


def test_all_that_it_made_goes_and_nothing_else(made: Store) -> None:
    purge(made, "mine", "here/mine")
    assert keys(made) == {FOREIGN}
    purge(made, "mine", "here/mine")
    assert keys(made) == {FOREIGN}


def test_outputs_stay_while_others_may_use_them(made: Store) -> None:
    claim(made, "other", "here/other", "Drafter other")
    before = keys(made)
    purge(made, "mine", "here/mine")
    gone = {layout.promoted("mine"), layout.record("mine"), layout.owner("mine")}
    assert keys(made) == before - gone


def test_nothing_of_another_drafter_of_the_same_name_is_touched(made: Store) -> None:
    before = keys(made)
    with pytest.raises(ConfigurationError, match="already belongs"):
        purge(made, "mine", "elsewhere/mine")
    assert keys(made) == before


def test_cut_short_anywhere_nothing_looks_whole_that_is_not_and_the_next_call_ends_it(
    made: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Store.delete
    left = 0

    def dying(self: Store, key: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedError
        delete(self, key)

    monkeypatch.setattr(Store, "delete", dying)
    for deletions in range(1, 20):  # each call gets further
        left = deletions
        try:
            purge(made, "mine", "here/mine")
        except InterruptedError:
            there = keys(made)
            for whole, part in ((MADE[2], MADE[1]), (MADE[4], MADE[3]), (MADE[5], MADE[6])):
                assert whole not in there or part in there
    assert keys(made) == {FOREIGN}
