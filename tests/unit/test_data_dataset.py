"""Samples come back as they were written, from parts that are verified, with bounded memory."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dflash.data.dataset import Dataset
from dflash.data.parts import PartLog, commit_key, make_commit, read_manifest, write_dataset
from dflash.data.rows import Origin, Row, check_trainable, read_rows, write_rows
from dflash.errors import DflashError, TemporaryError
from dflash.storage.store import FileRecord, NotFound, ObjectInfo


class MemoryStore:
    """The part of a store that datasets use, in a dictionary; `hidden` keys are left out of listings."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.hidden: set[str] = set()
        self.fetched: list[str] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> str:
        self.objects[key] = data
        return ""

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            return self.objects.setdefault(key, data) == data

    def find_json(self, key: str) -> Any:
        return json.loads(self.objects[key]) if key in self.objects else None

    def get_json(self, key: str) -> Any:
        if key not in self.objects:
            raise NotFound(key)
        return self.find_json(key)

    def exists(self, key: str) -> bool:
        return key in self.objects

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key, data in sorted(self.objects.items()):
            if key.startswith(prefix) and key not in self.hidden:
                yield ObjectInfo(key, len(data), "", None)  # type: ignore[arg-type]

    def download_file(self, record: FileRecord, path: Path) -> None:
        self.fetched.append(record.key)
        data = self.objects[record.key]
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise DflashError(f"{record.key} was changed")
        path.write_bytes(data)


def rows(count: int) -> list[Row]:
    generator = np.random.default_rng(0)
    return [
        Row(
            sample_id=f"{number:016x}-0",
            prompt_ids=generator.integers(0, 9999, generator.integers(1, 20)).astype(np.int32),
            output_ids=generator.integers(0, 9999, generator.integers(1, 90)).astype(np.int32),
            finish_reason="stop" if number % 3 else "length",
            think_span=(0, 1) if number % 2 else None,
            prompt_index=number,
            source_id=f"id {number} \u2028",
            group="g" if number % 5 else None,
            origin=Origin("sglang", "1.2", "abc"),
        )
        for number in range(count)
    ]


def same(one: Row, other: Row) -> bool:
    fields = (
        "sample_id",
        "finish_reason",
        "think_span",
        "prompt_index",
        "turn",
        "source_id",
        "group",
        "origin",
    )
    return (
        all(getattr(one, name) == getattr(other, name) for name in fields)
        and np.array_equal(one.prompt_ids, other.prompt_ids)
        and np.array_equal(one.output_ids, other.output_ids)
    )


def test_a_part_of_many_tokens_is_written_in_row_groups_and_read_as_one(tmp_path: Path) -> None:
    long = [replace(row, output_ids=np.arange(50_000, dtype=np.int32)) for row in rows(10)]
    (tmp_path / "p.parquet").write_bytes(write_rows(long))
    assert pq.ParquetFile(tmp_path / "p.parquet").num_row_groups == 4
    assert all(same(one, other) for one, other in zip(long, read_rows(tmp_path / "p.parquet"), strict=True))


def test_arrow_takes_memory_from_the_system() -> None:
    # Its usual allocator keeps what a part took, for each thread that ever wrote one.
    code = "import dflash.data.dataset, pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    environment = {key: value for key, value in os.environ.items() if key != "ARROW_DEFAULT_MEMORY_POOL"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert found.stdout.strip() == b"system"


def test_rows_survive_parquet(tmp_path: Path) -> None:
    written = rows(1200)
    (tmp_path / "p.parquet").write_bytes(write_rows(written))
    assert all(same(a, b) for a, b in zip(written, read_rows(tmp_path / "p.parquet"), strict=True))
    assert pq.read_table(tmp_path / "p.parquet").num_rows == 1200  # by any data tool


def test_the_mask_follows_from_the_lengths() -> None:
    row = Row("a-0", np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32))
    assert row.supervised.tolist() == [False, False, False, True, True]
    assert row.ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("prompt", "output"), [(0, 3), (3, 0), (0, 0)])
def test_a_row_that_is_all_or_not_at_all_supervised_is_never_written(prompt: int, output: int) -> None:
    row = Row("bad-0", np.ones(prompt, np.int32), np.ones(output, np.int32))
    with pytest.raises(ValueError, match="sample bad-0"):
        check_trainable(row)
    with pytest.raises(ValueError, match="sample bad-0"):
        write_rows([row])


def test_any_sample_is_found_by_number_and_each_part_is_fetched_once(tmp_path: Path) -> None:
    store: Any = MemoryStore()
    written = rows(120)
    manifest = write_dataset(store, "d", written, part_rows=1)
    assert (len(manifest.parts), manifest.samples) == (120, 120)
    with Dataset.open(store, "d", cache=tmp_path / "cache") as data:
        assert data.sample_ids.tolist() == [row.sample_id for row in written]
        assert data.lengths.tolist() == [[len(row.prompt_ids), len(row.output_ids)] for row in written]
        for number in (0, 119, 64, 64, 7):
            assert same(data.fetch(number), written[number])
        assert len(store.fetched) == 4
        with pytest.raises(IndexError):
            data.fetch(120)
    with Dataset.open(store, "d", cache=tmp_path / "cache") as again:
        assert same(again[64], written[64])
        assert len(store.fetched) == 4


def test_all_of_2500_parts_are_seen() -> None:
    store: Any = MemoryStore()
    (row,) = rows(1)
    log = PartLog(store, "d")
    part = make_commit(
        store, "d", sequence=0, worker="w", now=0.0, prompts={row.prompt_key: 0}, kept=[row], rejects=[]
    )
    for number in range(2500):
        sample = f"{number:016x}"
        changes = {"sequence": number, "prompts": [sample], "samples": [f"{sample}-0"]}
        assert log.append(part.model_copy(update=changes))
    resumed = PartLog(store, "d")
    assert len(resumed.refresh()) == 2500
    assert resumed.close(rows=2500, duplicates=0, held_out=0).samples == 2500
    with Dataset.open(store, "d") as data:
        assert len(data) == len(set(data.sample_ids.tolist())) == 2500
        assert same(data[2499], row)


def test_a_part_lost_from_a_listing_is_looked_up_and_a_part_that_is_gone_is_an_error() -> None:
    store: Any = MemoryStore()
    manifest = write_dataset(store, "d", rows(30), part_rows=10)
    assert manifest.parts[1].rows is not None
    key = manifest.parts[1].rows.key
    store.hidden.add(key)
    assert len(Dataset.open(store, "d")) == 30
    del store.objects[key]
    with pytest.raises(DflashError, match=r"part .* is missing"):
        Dataset.open(store, "d")


def test_a_changed_part_is_refused_and_a_manifest_that_miscounts_too() -> None:
    store: Any = MemoryStore()
    manifest = write_dataset(store, "d", rows(20), part_rows=10)
    assert manifest.parts[0].rows is not None
    key = manifest.parts[0].rows.key
    store.objects[key] = store.objects[key][:-1] + b"x"
    with Dataset.open(store, "d") as data, pytest.raises(DflashError, match="changed"):
        data.fetch(0)
    document = json.loads(store.objects["datasets/d/manifest.json"])
    document["samples"] = 21
    store.objects["datasets/d/manifest.json"] = json.dumps(document).encode()
    with pytest.raises(DflashError, match="says 21 samples and lists 20"):
        Dataset.open(store, "d")
    with pytest.raises(TemporaryError, match="not complete"):
        read_manifest(store, "other")


def test_a_number_is_taken_once_and_the_loser_learns_what_was_committed() -> None:
    store: Any = MemoryStore()
    first, second = PartLog(store, "d"), PartLog(store, "d")

    def commit(log: PartLog, row: Row) -> bool:
        part = make_commit(
            store,
            "d",
            sequence=log.next_sequence,
            worker="w",
            now=0.0,
            prompts={row.prompt_key: row.prompt_index},
            kept=[row],
            rejects=[],
        )
        return log.append(part)

    one, other = rows(2)
    assert commit(first, one)
    assert not commit(second, other)
    assert [key for part in second.refresh() for key in part.prompts] == [one.prompt_key]
    assert commit(second, other)
    assert first.refresh()[0].samples == [other.sample_id]
    assert first.close(rows=2, duplicates=0, held_out=0) == second.close(rows=2, duplicates=0, held_out=0)
    assert store.exists(commit_key("d", 1))


def test_an_import_that_was_interrupted_goes_on_where_it_stopped() -> None:
    store: Any = MemoryStore()
    written = rows(35)

    def torn() -> Iterator[Row]:
        yield from written[:25]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(store, "d", torn(), part_rows=10)
    assert write_dataset(store, "d", written, part_rows=10).samples == 35
    with Dataset.open(store, "d") as data:
        assert data.sample_ids.tolist() == [row.sample_id for row in written]
