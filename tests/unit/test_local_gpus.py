"""Processes of one machine share its GPUs out: each alone on its own while there are enough."""

import pytest

from operators.accounts import machine_gpus, visible_gpus
from operators.local import gpu_share

EIGHT = [str(i) for i in range(8)]


def shares(gpus: list[str], processes: int) -> list[str]:
    return [gpu_share(gpus, place, processes)["CUDA_VISIBLE_DEVICES"] for place in range(processes)]


def test_with_enough_gpus_each_process_has_its_own() -> None:
    assert shares(EIGHT, 8) == EIGHT
    assert shares(EIGHT, 7) == EIGHT[:7]


def test_few_processes_have_several_gpus_each_and_none_is_shared() -> None:
    assert shares(EIGHT, 2) == ["0,1,2,3", "4,5,6,7"]
    assert shares(EIGHT, 3) == ["0,1", "2,3", "4,5"]
    assert shares(EIGHT, 1) == ["0,1,2,3,4,5,6,7"]


def test_few_gpus_take_turns() -> None:
    assert shares(["0", "1"], 5) == ["0", "1", "0", "1", "0"]


@pytest.mark.parametrize("gpus", [[], ["3"]])
def test_where_there_is_no_choice_nothing_is_said(gpus: list[str]) -> None:
    assert gpu_share(gpus, 1, 2) == {}


def test_gpus_that_are_hidden_are_neither_used_nor_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert visible_gpus() == ["4", "6"]
    assert machine_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (visible_gpus(), machine_gpus()) == ([], 1)
