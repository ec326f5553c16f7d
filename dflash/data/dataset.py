"""Random access to the samples of a committed dataset, with bounded memory.

The manifest is the truth: its parts, their sizes and hashes; a listing of the store is only a cross-check
that something was not deleted. Each part is fetched when a sample of it is first asked for, verified, and
unpacked into an Arrow file on local disk, which is mapped: the operating system may drop its pages at any
time. Order, masks and batches are the trainer's.
"""

import os
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash import layout
from dflash.data.parts import Manifest, PartCommit, PartFile, commit_key, read_manifest
from dflash.data.rows import Row, read_rows, row_at
from dflash.errors import DflashError
from dflash.storage.store import FileRecord, Store

_OPEN_PARTS = 64
_READERS = 16


class Dataset:
    """A dataset's samples by number, in the manifest's order. Thread-safe."""

    def __init__(self, store: Store, manifest: Manifest, cache: Path | None = None) -> None:
        self.store = store
        self.manifest = manifest
        self._files: list[PartFile] = [part.rows for part in manifest.parts if part.rows is not None]
        self._sequences = [part.sequence for part in manifest.parts if part.rows is not None]
        self._ends = np.cumsum([file.rows for file in self._files]).tolist()
        self._temporary = None if cache else tempfile.TemporaryDirectory(prefix="dflash-dataset-")
        self._folder = cache or Path(self._temporary.name if self._temporary else "")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._fetching = [threading.Lock() for _ in self._files]
        self._index: tuple[NDArray[np.str_], NDArray[np.int32]] | None = None

    @classmethod
    def open(cls, store: Store, dataset: str, cache: Path | None = None) -> Self:
        """Open a committed dataset.

        `cache` keeps unpacked parts between runs; by default they lie in a temporary folder that `close`
        removes. Raises TemporaryError without a manifest, DflashError when a part of it is missing.
        """
        manifest = read_manifest(store, dataset)
        opened = cls(store, manifest, cache)
        opened._check_against_listing(dataset)
        return opened

    def _check_against_listing(self, dataset: str) -> None:
        listed = {found.key: found.size for found in self.store.list(layout.dataset(dataset, "parts/"))}
        for file in self._files:
            if listed.get(file.key) == file.size:
                continue
            if file.key in listed or not self.store.exists(file.key):  # a listing may be incomplete
                state = (
                    f"has {listed[file.key]} bytes, not {file.size}" if file.key in listed else "is missing"
                )
                raise DflashError(
                    f"part {file.key} of dataset {dataset} {state}: "
                    "restore it, or set spec.rerun to generate again"
                )

    def __len__(self) -> int:
        return self.manifest.samples

    @property
    def sample_ids(self) -> NDArray[np.str_]:
        """Every sample's id, in order. Read from the commits on first use; 4 bytes a character."""
        return self._read_index()[0]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[len, 2]: prompt tokens and answer tokens of every sample."""
        return self._read_index()[1]

    def _read_index(self) -> tuple[NDArray[np.str_], NDArray[np.int32]]:
        with self._lock:
            if self._index is None:
                ids: list[NDArray[np.str_]] = []
                lengths: list[NDArray[np.int32]] = []
                with ThreadPoolExecutor(_READERS) as pool:
                    for commit in pool.map(self._read_commit, self._sequences):
                        ids.append(np.array(commit.samples, dtype=np.str_))
                        lengths.append(np.array([commit.prompt_lengths, commit.output_lengths], np.int32).T)
                self._index = (
                    np.concatenate(ids) if ids else np.array([], np.str_),
                    np.concatenate(lengths) if lengths else np.zeros((0, 2), np.int32),
                )
                if len(self._index[0]) != len(self):
                    raise DflashError(
                        f"the commits of dataset {self.manifest.dataset} hold {len(self._index[0])} samples "
                        f"and its manifest {len(self)}: restore them, or set spec.rerun to generate again"
                    )
            return self._index

    def _read_commit(self, sequence: int) -> PartCommit:
        return PartCommit.model_validate(self.store.get_json(commit_key(self.manifest.dataset, sequence)))

    def fetch(self, number: int) -> Row:
        """Sample `number`, 0 <= number < len. Its part is fetched and verified on first use."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        part = bisect_right(self._ends, number)
        first = self._ends[part] - self._files[part].rows
        return row_at(self._table(part), number - first)

    __getitem__ = fetch

    def _table(self, part: int) -> Any:
        with self._lock:
            table = self._open.get(part)
            if table is not None:
                self._open.move_to_end(part)
                return table
        with self._fetching[part]:  # one fetch per part, many parts at once
            table = self._map(part)
        with self._lock:
            self._open[part] = table
            self._open.move_to_end(part)
            while len(self._open) > _OPEN_PARTS:
                self._open.popitem(last=False)
        return table

    def _map(self, part: int) -> Any:
        file = self._files[part]
        path = self._folder / f"{file.sha256}.arrow"
        if not path.exists():
            packed = self._folder / f"{file.sha256}.{os.getpid()}.parquet"
            self.store.download_file(FileRecord(key=file.key, size=file.size, sha256=file.sha256), packed)
            table = pq.read_table(packed)
            if table.num_rows != file.rows:
                raise DflashError(
                    f"part {file.key} has {table.num_rows} rows and its manifest says {file.rows}"
                )
            partial = path.with_suffix(f".{os.getpid()}.partial")  # a cache may be shared
            with pa.ipc.new_file(partial, table.schema) as writer:
                writer.write_table(table.combine_chunks())
            packed.unlink()
            partial.rename(path)
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def rejects(self) -> Iterator[Row]:
        """The samples that the gate dropped, with their reasons, part by part."""
        for part in self.manifest.parts:
            if part.rejects is not None:
                path = self._folder / f"{part.rejects.sha256}.parquet"
                record = FileRecord(part.rejects.key, part.rejects.size, part.rejects.sha256)
                self.store.download_file(record, path)
                yield from read_rows(path)
                path.unlink()

    def close(self) -> None:
        """Let go of the files, and remove them where they are temporary."""
        with self._lock:
            self._open.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
