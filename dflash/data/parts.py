"""A dataset under construction: an append-only log of committed parts, closed by a manifest.

A part is a Parquet file under a content-hashed key, and then a commit `parts/<sequence>.json`, which is
create-once. Sequence numbers have no gaps: to append number n a worker must have read all numbers below,
so it knows every prompt that anybody has finished, and leaves out those of its own that somebody else
committed first. That makes the log exactly-once for any number of workers that race for the same
prompts, without locks and without trusting a listing to be complete. The manifest, create-once too, is
a function of the log, so it does not matter who writes it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from pydantic import BaseModel, ConfigDict, Field

from dflash import layout
from dflash.data.rows import Row, write_rows
from dflash.errors import DflashError, TemporaryError
from dflash.storage.store import Store

_READERS = 16
_PART_ROWS = 512


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PartFile(_Document):
    """A file of rows in the store."""

    key: str
    size: int
    sha256: str
    rows: int


class Dropped(_Document):
    """A sample that is not trained on, and why."""

    sample_id: str
    reason: str
    supervised: int


class PartCommit(_Document):
    """What one commit accounts for. Prompts are named by key; indexes are for people."""

    sequence: int
    worker: str
    committed_at: float
    prompts: list[str] = Field(description="Keys of the prompts that are done with this commit.")
    indexes: list[int] = Field(description="Their ordinals in the prompt files.")
    kept: int = Field(description="How many of them have a sample in `rows`.")
    samples: list[str] = Field(description="Sample ids in the order of the file.")
    prompt_lengths: list[int]
    output_lengths: list[int]
    dropped: list[Dropped]
    rows: PartFile | None = Field(description="None when every sample of this part was dropped.")
    rejects: PartFile | None = Field(description="The dropped samples, for the report.")


class ManifestPart(_Document):
    """One part, as the manifest lists it."""

    sequence: int
    rows: PartFile | None
    rejects: PartFile | None
    prompt_tokens: int
    output_tokens: int


class PromptTotals(_Document):
    """What became of the rows of the prompt files: rows = duplicates + held_out + kept + dropped."""

    rows: int
    duplicates: int
    held_out: int
    kept: int = Field(description="Prompts with at least one sample.")
    dropped: int = Field(description="Prompts without any.")


class Manifest(_Document):
    """The committed dataset. `rows` of all parts, in order, are its samples."""

    version: int = 1
    dataset: str
    samples: int
    prompt_tokens: int
    output_tokens: int
    prompts: PromptTotals
    dropped: dict[str, int] = Field(description="Samples by reason.")
    histogram: dict[str, int] = Field(
        description="Samples by supervised tokens; a key is a bin's lower edge."
    )
    parts: list[ManifestPart]


def commit_key(dataset: str, sequence: int) -> str:
    """Key of one commit."""
    return layout.dataset(dataset, f"parts/{sequence:08d}.json")


def histogram_bin(tokens: int) -> str:
    """Lower edge of the bin: exact up to 64, where small counts matter, then powers of two."""
    return str(tokens if tokens <= 64 else 1 << (tokens.bit_length() - 1))


def upload_rows(store: Store, dataset: str, rows: list[Row]) -> PartFile | None:
    """Write rows under their content hash; None when there are none."""
    if not rows:
        return None
    data = write_rows(rows)
    sha = hashlib.sha256(data).hexdigest()
    key = layout.dataset(dataset, f"parts/{sha}.parquet")
    store.put(key, data)
    return PartFile(key=key, size=len(data), sha256=sha, rows=len(rows))


class PartLog:
    """A dataset's commits, read from the start and appended to. Not thread-safe."""

    def __init__(self, store: Store, dataset: str) -> None:
        self.store = store
        self.dataset = dataset
        self.parts: list[ManifestPart] = []
        self.samples = 0
        self.accounted = 0
        self.kept = 0
        self.dropped: Counter[str] = Counter()
        self.histogram: Counter[str] = Counter()

    @property
    def next_sequence(self) -> int:
        """Number of the first commit that was not read yet."""
        return len(self.parts)

    def refresh(self) -> list[PartCommit]:
        """Read the commits that are new, in order."""
        return list(self.read_on())

    def read_on(self) -> Iterator[PartCommit]:
        """As `refresh`, a few at a time: all commits of a large dataset fill hundreds of megabytes."""
        with ThreadPoolExecutor(_READERS) as pool:
            width = 1  # at first: in steady state there is mostly nothing new; then many at once
            while True:
                numbers = range(self.next_sequence, self.next_sequence + width)
                for found in pool.map(self._read, numbers):
                    if found is None:
                        return
                    self._take(found)
                    yield found
                width = _READERS

    def _read(self, sequence: int) -> PartCommit | None:
        document = self.store.find_json(commit_key(self.dataset, sequence))
        return None if document is None else PartCommit.model_validate(document)

    def append(self, commit: PartCommit) -> bool:
        """Commit a part under the next number; False when another worker took that number."""
        if commit.sequence != self.next_sequence:
            raise ValueError(f"commit {commit.sequence} does not follow {self.next_sequence - 1}")
        document = commit.model_dump_json().encode()
        if not self.store.create(commit_key(self.dataset, commit.sequence), document):
            return False
        self._take(commit)
        return True

    def _take(self, commit: PartCommit) -> None:
        self.parts.append(
            ManifestPart(
                sequence=commit.sequence,
                rows=commit.rows,
                rejects=commit.rejects,
                prompt_tokens=sum(commit.prompt_lengths),
                output_tokens=sum(commit.output_lengths),
            )
        )
        self.samples += len(commit.samples)
        self.accounted += len(commit.prompts)
        self.kept += commit.kept
        self.dropped.update(drop.reason for drop in commit.dropped)
        self.histogram.update(histogram_bin(tokens) for tokens in commit.output_lengths)

    def close(self, *, rows: int, duplicates: int, held_out: int) -> Manifest:
        """Write the manifest, or read the one that another worker wrote from the same log."""
        manifest = Manifest(
            dataset=self.dataset,
            samples=self.samples,
            prompt_tokens=sum(part.prompt_tokens for part in self.parts),
            output_tokens=sum(part.output_tokens for part in self.parts),
            prompts=PromptTotals(
                rows=rows,
                duplicates=duplicates,
                held_out=held_out,
                kept=self.kept,
                dropped=self.accounted - self.kept,
            ),
            dropped=dict(sorted(self.dropped.items())),
            histogram={key: self.histogram[key] for key in sorted(self.histogram, key=int)},
            parts=self.parts,
        )
        if self.store.create(layout.dataset_manifest(self.dataset), manifest.model_dump_json().encode()):
            return manifest
        return read_manifest(self.store, self.dataset)


def find_manifest(store: Store, dataset: str) -> Manifest | None:
    """The committed manifest, or None while the dataset is being made."""
    document = store.find_json(layout.dataset_manifest(dataset))
    return None if document is None else Manifest.model_validate(document)


def read_manifest(store: Store, dataset: str) -> Manifest:
    """The committed manifest. TemporaryError: there is none yet. DflashError: it contradicts itself."""
    manifest = find_manifest(store, dataset)
    if manifest is None:
        raise TemporaryError(
            f"dataset {dataset} is not complete: it has no manifest.json; run generation first"
        )
    counted = sum(part.rows.rows for part in manifest.parts if part.rows is not None)
    if counted != manifest.samples:
        raise DflashError(
            f"the manifest of dataset {dataset} says {manifest.samples} samples and lists {counted}: "
            "it was changed by hand; restore it, or set spec.rerun to generate again"
        )
    return manifest


def make_commit(
    store: Store,
    dataset: str,
    *,
    sequence: int,
    worker: str,
    now: float,
    prompts: Mapping[str, int],
    kept: list[Row],
    rejects: list[Row],
) -> PartCommit:
    """Upload rows, and say what a commit with this number would account for. Commits nothing yet.

    `prompts` maps the key of each prompt that is done to its ordinal.
    """
    return PartCommit(
        sequence=sequence,
        worker=worker,
        committed_at=now,
        prompts=list(prompts),
        indexes=list(prompts.values()),
        kept=len({row.prompt_key for row in kept}),
        samples=[row.sample_id for row in kept],
        prompt_lengths=[len(row.prompt_ids) for row in kept],
        output_lengths=[len(row.output_ids) for row in kept],
        dropped=[
            Dropped(sample_id=row.sample_id, reason=row.dropped or "", supervised=len(row.output_ids))
            for row in rejects
        ],
        rows=upload_rows(store, dataset, kept),
        rejects=upload_rows(store, dataset, rejects),
    )


def write_dataset(
    store: Store, dataset: str, rows: Iterable[Row], *, part_rows: int = _PART_ROWS
) -> Manifest:
    """Commit ready samples as a whole dataset: an import. Sample ids must be distinct.

    Going on after an interruption: parts that are committed already are taken as they are.
    """
    log = PartLog(store, dataset)
    for _ in log.read_on():
        pass
    stream = iter(rows)
    for part in log.parts:
        assert part.rows is not None
        for _ in islice(stream, part.rows.rows):
            pass
    while batch := list(islice(stream, part_rows)):
        commit = make_commit(
            store,
            dataset,
            sequence=log.next_sequence,
            worker="import",
            now=0.0,
            prompts={row.prompt_key: row.prompt_index for row in batch},
            kept=batch,
            rejects=[],
        )
        if not log.append(commit):
            raise TemporaryError(f"dataset {dataset} is being written by another process; wait for it to end")
    return log.close(rows=log.kept, duplicates=0, held_out=0)
