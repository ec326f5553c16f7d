"""Answers as they are measured, kept in the store, so that a restarted evaluation goes on.

Small objects under the evaluation's folder, each with the answers of a few seconds. Not the report:
nothing here commits anything.
"""

import time
import uuid
from typing import TYPE_CHECKING

import orjson

from dflash import layout
from dflash.evaluation.answers import Answer

if TYPE_CHECKING:
    from dflash.storage.store import Store

_FLUSH_SECONDS = 5.0

Key = tuple[str, int, int, str]


class Ledger:
    """All answers of an evaluation, this process's and those of attempts before it."""

    def __init__(self, store: "Store", evaluation: str) -> None:
        self._store = store
        self._folder = layout.evaluation(evaluation, "answers/")
        self._answers: dict[Key, Answer] = {}
        self._new: list[Answer] = []
        self._flushed = time.monotonic()
        for item in store.list(self._folder):
            for row in orjson.loads(store.get(item.key)):
                answer = Answer.model_validate(row)
                self._answers.setdefault(_key(answer), answer)

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, contender: str, concurrency: int, repeat: int, sample_id: str) -> Answer | None:
        """An answer that is there already."""
        return self._answers.get((contender, concurrency, repeat, sample_id))

    def add(self, answer: Answer) -> None:
        """Keep an answer; written within a few seconds."""
        answer.check()
        self._answers[_key(answer)] = answer
        self._new.append(answer)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._new:
            data = orjson.dumps([answer.model_dump() for answer in self._new])
            self._store.put(f"{self._folder}{uuid.uuid4().hex}.json", data)
            self._new = []
        self._flushed = time.monotonic()

    def of(self, contender: str, concurrency: int) -> list[Answer]:
        """All answers of one contender at one concurrency."""
        return [a for (c, n, _, _), a in self._answers.items() if c == contender and n == concurrency]


def _key(answer: Answer) -> Key:
    return answer.contender, answer.concurrency, answer.repeat, answer.sample_id
