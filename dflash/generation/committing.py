"""From answered prompts to commits, when others may be committing the same prompts.

All calls block on the store and are made from one thread at a time.
"""

import logging
import time

from dflash.data.keyset import KeySet
from dflash.data.parts import PartLog, make_commit
from dflash.generation.gate import Tally
from dflash.generation.job import Done
from dflash.storage.store import Store

log = logging.getLogger("dflash.generation")


class Committer:
    """Appends to a dataset's log what nobody has committed yet."""

    def __init__(self, store: Store, dataset: str, worker: str, tally: Tally) -> None:
        self.parts = PartLog(store, dataset)
        self.done = KeySet()
        """Keys of the prompts that others, or this worker's former self, have accounted for.

        Not of those it commits itself: it meets each of its prompts once, and a large dataset has many.
        """
        self._store = store
        self._dataset = dataset
        self._worker = worker
        self._tally = tally

    def refresh(self) -> None:
        """Take in what others, or this worker's former self, have committed."""
        for commit in self.parts.read_on():
            for key in commit.prompts:
                self.done.add(key)
            for sample in commit.samples:
                self._tally.add(sample, None)
            for dropped in commit.dropped:
                self._tally.add(dropped.sample_id, dropped.reason, dropped.supervised)

    def commit(self, batch: list[Done]) -> None:
        """Commit these prompts, but for those that another worker commits first."""
        while batch := [done for done in batch if done.prompt.key not in self.done]:
            commit = make_commit(
                self._store,
                self._dataset,
                sequence=self.parts.next_sequence,
                worker=self._worker,
                now=time.time(),
                prompts={done.prompt.key: done.prompt.index for done in batch},
                kept=[row for done in batch for row in done.kept],
                rejects=[row for done in batch for row in done.rejects],
            )
            if self.parts.append(commit):
                log.info(
                    "part %d: %d samples of %d prompts", commit.sequence, len(commit.samples), len(batch)
                )
                return
            self.refresh()
