"""Which rows train, cut to what; and versions compared between processes."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash.data.rows import Row
from dflash.errors import ConfigurationError
from dflash.training.samples import TrainingSet
from dflash.training.versions import check_versions, own_versions


@dataclass
class Rows:
    """Stands in for a dataset."""

    rows: list[Row]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([[len(row.prompt_ids), len(row.output_ids)] for row in self.rows], np.int32)

    def fetch(self, number: int) -> Row:
        return self.rows[number]


def row(name: str, prompt: int, output: int, token: int = 1) -> Row:
    return Row(name, np.full(prompt, 2, np.int32), np.full(output, token, np.int32))


def training_set(*rows: Row, max_length: int = 10) -> TrainingSet:
    return TrainingSet(Rows(list(rows)), max_length, vocab_size=8)  # type: ignore[arg-type]


def test_rows_without_two_answer_tokens_within_the_cut_are_left_out() -> None:
    found = training_set(row("fits", 4, 6), row("cut", 6, 40), row("one left", 9, 5), row("none left", 12, 5))
    assert [found[i].sample_id for i in range(len(found))] == ["fits", "cut"]
    assert found.left_out == 2


def test_ids_are_cut_and_only_the_answer_is_supervised() -> None:
    sample = training_set(row("cut", 6, 40))[0]
    assert len(sample.ids) == len(sample.supervised) == 10
    assert sample.supervised.tolist() == [False] * 6 + [True] * 4


def test_a_dataset_that_cannot_train_is_refused() -> None:
    sentence = r"none of the dataset's 2 samples .* training\.maxLength 10 .*longest has 18"
    with pytest.raises(ConfigurationError, match=sentence):
        training_set(row("a", 12, 5), row("b", 10, 8))


def test_ids_of_another_tokenizer_are_refused_by_the_sample_that_has_them() -> None:
    with pytest.raises(
        ConfigurationError, match="sample foreign has token id 8, beyond the target's vocabulary of 8"
    ):
        training_set(row("foreign", 3, 4, token=8))[0]


def test_processes_of_one_run_have_the_same_versions() -> None:
    check_versions(own_versions(), "rank 0")
    with pytest.raises(ConfigurationError, match=r"rank 0 has torch 1\.0, this process"):
        check_versions({**own_versions(), "torch": "1.0"}, "rank 0")
    check_versions({**own_versions(), "python": "3.0"}, "rank 0")
