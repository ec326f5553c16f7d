"""What is trained on: a dataset's rows cut to the longest length, and which of them can train at all.

A row trains when it has an anchor: two consecutive supervised tokens within the cut. Which rows do
is known from their lengths alone, before anything heavy is loaded. Not for order or batches.
"""

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.data.dataset import Dataset
from dflash.errors import ConfigurationError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingSample:
    """Token ids int32 [T] and the loss mask bool [T]."""

    sample_id: str
    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]


class TrainingSet:
    """The samples of a dataset that can train, numbered 0, 1, 2, ... in the dataset's order."""

    def __init__(self, dataset: Dataset, max_length: int, vocab_size: int) -> None:
        """ConfigurationError when no sample can train."""
        self._dataset = dataset
        self._max_length = max_length
        self._vocab_size = vocab_size
        prompt, output = dataset.lengths[:, 0], dataset.lengths[:, 1]
        supervised = np.minimum(prompt + output, max_length) - prompt
        self._rows = np.flatnonzero(supervised >= 2).astype(np.int64)
        self.left_out = len(dataset) - len(self._rows)
        """Samples without two supervised tokens within the cut."""
        if not len(self._rows):
            longest = int((prompt + output).max()) if len(dataset) else 0
            raise ConfigurationError(
                f"none of the dataset's {len(dataset)} samples has two consecutive answer tokens within "
                f"training.maxLength {max_length} (the longest has {longest}); raise training.maxLength "
                "or look at what generation kept"
            )
        if self.left_out:
            log.warning(
                "%d of %d samples have no answer within training.maxLength %d and are not trained on",
                self.left_out,
                len(dataset),
                max_length,
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> TrainingSample:
        """A sample, cut. ConfigurationError when its ids are not the target's."""
        row = self._dataset.fetch(int(self._rows[number]))
        ids = row.ids[: self._max_length]
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ConfigurationError(
                f"sample {row.sample_id} has token id {int(ids.max())}, beyond the target's vocabulary of "
                f"{self._vocab_size}; the dataset was made with another tokenizer, so generate it again "
                "(spec.rerun)"
            )
        return TrainingSample(row.sample_id, ids, row.supervised[: self._max_length])
