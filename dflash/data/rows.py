"""A sample as it is stored: exactly the ids sent, exactly the ids received, in Parquet with zstd.

The loss mask is not stored: it follows from the two lengths. Any data tool reads the files. Nothing here
re-tokenises or knows a template; which samples are good is the gate's business.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Ids = NDArray[np.int32]

_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("source_id", pa.string()),
        pa.field("group", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("think_start", pa.int32()),
        pa.field("think_end", pa.int32()),
        pa.field("finish_reason", _NAME, nullable=False),
        pa.field("engine", _NAME, nullable=False),
        pa.field("engine_version", _NAME, nullable=False),
        pa.field("weights", _NAME, nullable=False),
        pa.field("dropped", _NAME),
    ]
)
"""`dropped` is the gate's reason in files of rejects, and null in a dataset's rows."""
_GROUP_TOKENS = 1 << 17
"""Tokens in a row group, or one row of more."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What produced a sample."""

    engine: str = "imported"
    version: str = ""
    weights: str = ""
    """Fingerprint of the target's weights."""


@dataclass(frozen=True, slots=True)
class Row:
    """One assistant turn: what the target saw and what it answered, int32 token ids."""

    sample_id: str
    prompt_ids: Ids
    output_ids: Ids
    finish_reason: str = "stop"
    think_span: tuple[int, int] | None = None
    """Positions [start, end) in `output_ids` of the thinking, tags included; None without thinking."""
    prompt_index: int = 0
    turn: int = 0
    source_id: str = ""
    group: str | None = None
    origin: Origin = Origin()
    dropped: str | None = None

    @property
    def prompt_key(self) -> str:
        """Key of the prompt that this is a turn of: the sample id up to its last dash."""
        return self.sample_id.rpartition("-")[0] or self.sample_id

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def ids(self) -> Ids:
        """Prompt and answer, one after the other."""
        return np.concatenate([self.prompt_ids, self.output_ids])

    @property
    def supervised(self) -> NDArray[np.bool_]:
        """The loss mask, bool[length]: the answer and nothing else."""
        mask = np.zeros(self.length, dtype=bool)
        mask[len(self.prompt_ids) :] = True
        return mask


def check_trainable(row: Row) -> None:
    """Some of the row is supervised and some is not, or ValueError: a mask of one kind trains nothing."""
    if not 0 < len(row.output_ids) < row.length:
        raise ValueError(
            f"sample {row.sample_id}: {len(row.output_ids)} of {row.length} tokens are supervised; "
            "a row needs a prompt and an answer"
        )


def write_rows(rows: list[Row]) -> bytes:
    """A Parquet file of these rows. Kept rows must pass `check_trainable`.

    Written a row group at a time: while one is encoded it takes several times its size.
    """
    for row in rows:
        if row.dropped is None:
            check_trainable(row)
    buffer = BytesIO()
    # Dictionaries pay for names that repeat; for token ids they cost time and no longer shrink the file.
    names = [field.name for field in SCHEMA if pa.types.is_dictionary(field.type)]
    with pq.ParquetWriter(
        buffer, SCHEMA, compression="zstd", compression_level=3, use_dictionary=names
    ) as writer:
        for group in _groups(rows):
            writer.write_table(_table(group))
    return buffer.getvalue()


def _groups(rows: list[Row]) -> Iterator[list[Row]]:
    first = tokens = 0
    for place, row in enumerate(rows, 1):
        tokens += row.length
        if tokens >= _GROUP_TOKENS:
            yield rows[first:place]
            first, tokens = place, 0
    if first < len(rows):
        yield rows[first:]


def _table(rows: list[Row]) -> Any:
    columns = {
        "sample_id": [row.sample_id for row in rows],
        "prompt_index": [row.prompt_index for row in rows],
        "turn": [row.turn for row in rows],
        "source_id": [row.source_id for row in rows],
        "group": [row.group for row in rows],
        "prompt_ids": _lists([row.prompt_ids for row in rows]),
        "output_ids": _lists([row.output_ids for row in rows]),
        "think_start": [row.think_span[0] if row.think_span else None for row in rows],
        "think_end": [row.think_span[1] if row.think_span else None for row in rows],
        "finish_reason": _names(row.finish_reason for row in rows),
        "engine": _names(row.origin.engine for row in rows),
        "engine_version": _names(row.origin.version for row in rows),
        "weights": _names(row.origin.weights for row in rows),
        "dropped": _names(row.dropped for row in rows),
    }
    return pa.table(columns, schema=SCHEMA)


def _lists(arrays: list[Ids]) -> Any:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays).astype(np.int32, copy=False) if arrays else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _names(values: Iterable[str | None]) -> Any:
    return pa.array(list(values), pa.string()).dictionary_encode().cast(_NAME)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file, a batch at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=512):
            table = pa.Table.from_batches([batch])
            for place in range(table.num_rows):
                yield row_at(table, place)


def row_at(table: Any, place: int) -> Row:
    """One row of a table with `SCHEMA`'s columns. Its ids are views of the table's memory."""

    def value(name: str) -> Any:
        return table.column(name)[place].as_py()

    def ids(name: str) -> Ids:
        found: Ids = table.column(name)[place].values.to_numpy()
        return found

    start, end = value("think_start"), value("think_end")
    return Row(
        sample_id=value("sample_id"),
        prompt_ids=ids("prompt_ids"),
        output_ids=ids("output_ids"),
        finish_reason=value("finish_reason"),
        think_span=None if start is None else (start, end),
        prompt_index=value("prompt_index"),
        turn=value("turn"),
        source_id=value("source_id") or "",
        group=value("group"),
        origin=Origin(value("engine"), value("engine_version"), value("weights")),
        dropped=value("dropped"),
    )
