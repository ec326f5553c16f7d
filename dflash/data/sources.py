"""Files behind a prompts address: local or S3, one or a glob, plain, gzip or zstd; JSON lines or Parquet.

Yields raw records with the file and line they came from. Lines end at LF alone (CRLF is accepted): the
Unicode separators that `str.splitlines` also cuts at may stand inside a JSON string. Nothing here knows
what a prompt is.
"""

import glob
import gzip
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from dflash.errors import ConfigurationError
from dflash.storage.store import Store

_WILD = "*?["
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded row. `line` counts from 1; for Parquet it is the row number."""

    value: Any
    file: str
    line: int
    repaired: bool
    """Half a surrogate pair, which no UTF-8 text can hold, was replaced by U+FFFD."""


@dataclass(frozen=True)
class SourceFile:
    """A file and, when it lies in S3, the store to fetch it from."""

    name: str
    path: Path | None = None
    store: Store | None = None
    key: str = ""


def source_files(uri: str, base: Path, store: Store | None = None) -> list[SourceFile]:
    """The files behind an address, ordered by name. Relative paths start at `base`.

    For s3:// addresses the bucket is reached with `store`'s endpoint and credentials.
    Raises ConfigurationError when there are none.
    """
    files = _s3_files(uri, store) if uri.startswith("s3://") else _local_files(uri, base)
    if not files:
        raise ConfigurationError(f"no file at {uri}: correct prompts.uri, or put the prompts there")
    return files


def _local_files(uri: str, base: Path) -> list[SourceFile]:
    pattern = Path(base, Path(uri).expanduser())
    if any(sign in uri for sign in _WILD) and not pattern.exists():
        paths = sorted(Path(found) for found in glob.glob(str(pattern), recursive=True))  # noqa: PTH207
    else:
        paths = [pattern] if pattern.exists() else []
    if pattern.is_dir():
        raise ConfigurationError(f"{pattern} is a folder: give a file or a glob, such as {uri}/*.jsonl")
    return [SourceFile(str(path), path=path) for path in paths if path.is_file()]


def _s3_files(uri: str, store: Store | None) -> list[SourceFile]:
    bucket, _, pattern = uri.removeprefix("s3://").partition("/")
    if not bucket or not pattern:
        raise ConfigurationError(
            f"{uri} names no object: write s3://bucket/key, or a glob such as s3://bucket/x/*.jsonl"
        )
    if store is None:
        raise ConfigurationError(
            f"{uri} needs an S3 storage: set storage.uri and its endpoint, or use a local file"
        )
    reader = store.in_bucket(bucket)
    fixed = pattern[: min((pattern.index(sign) for sign in _WILD if sign in pattern), default=len(pattern))]
    try:
        keys = sorted(found.key for found in reader.list(fixed) if fnmatchcase(found.key, pattern))
    except ValueError as error:
        raise ConfigurationError(f"prompts.uri {uri}: {error}") from error
    return [SourceFile(f"s3://{bucket}/{key}", store=reader, key=key) for key in keys]


def fingerprint(files: list[SourceFile]) -> str:
    """Hash of the files' bytes in order, streamed; names and places do not enter."""
    whole = hashlib.sha256()
    for file in files:
        digest = hashlib.sha256()
        with _local_copy(file) as path, path.open("rb") as stream:
            while block := stream.read(_CHUNK):
                digest.update(block)
        whole.update(digest.digest())
    return whole.hexdigest()


def read_records(files: list[SourceFile]) -> Iterator[Record]:
    """Every row of every file, in order, in constant memory."""
    for file in files:
        with _local_copy(file) as path:
            if _plain_name(file.name).endswith(".parquet"):
                yield from _parquet_records(file.name, path)
            else:
                yield from _json_records(file.name, path)


@contextmanager
def _local_copy(file: SourceFile) -> Iterator[Path]:
    """The file on this machine. An S3 object is fetched whole: a worker reads its prompts for hours."""
    if file.path is not None:
        yield file.path
        return
    assert file.store is not None
    with tempfile.TemporaryDirectory(prefix="dflash-prompts-") as folder:
        path = Path(folder, "prompts")
        file.store.fetch(file.key, path)
        yield path


def _plain_name(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".zst")


def _open(name: str, path: Path) -> BinaryIO:
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if name.endswith(".zst"):
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return cast(BinaryIO, io.BufferedReader(stream, _CHUNK))
    return path.open("rb", buffering=_CHUNK)


def _json_records(name: str, path: Path) -> Iterator[Record]:
    line = 0
    try:
        with _open(name, path) as stream:
            for raw in stream:  # a binary stream splits at b"\n" alone
                line += 1
                text = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                text = text.strip(b" \t\r\n")
                if text:
                    value, repaired = _decode(text, name, line)
                    yield Record(value, name, line, repaired)
    except (EOFError, gzip.BadGzipFile) as error:
        raise ConfigurationError(
            f"{name}: broken compressed file after line {line} ({error}); write it again"
        ) from error
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno is not None:
            raise ConfigurationError(f"cannot read {name}: {error.strerror or error}") from error
        raise ConfigurationError(
            f"{name}: broken compressed file after line {line} ({error}); write it again"
        ) from error


def _decode(text: bytes, name: str, line: int) -> tuple[Any, bool]:
    try:
        return orjson.loads(text), False
    except orjson.JSONDecodeError as strict:
        try:
            value = json.loads(text)  # accepts an escaped half of a surrogate pair; orjson does not
            return without_surrogates(value), True
        except (ValueError, RecursionError):
            raise ConfigurationError(
                f"{name} line {line} is not JSON ({strict}): write one JSON object a line"
            ) from strict


def without_surrogates(value: Any) -> Any:
    """The same value with each lone surrogate replaced by U+FFFD, so that it can be written as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def _parquet_records(name: str, path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory(prefix="dflash-prompts-") as folder:
        if name != _plain_name(name):  # Parquet is read from its end: it cannot be streamed
            plain = Path(folder, "plain.parquet")
            with _open(name, path) as packed, plain.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _CHUNK)
            path = plain
        try:
            file = pyarrow.parquet.ParquetFile(path, memory_map=False)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigurationError(f"{name} is not a Parquet file: {error}") from error
        line = 0
        with file:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    line += 1
                    yield Record(_without_nulls(value), name, line, repaired=False)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct all fields: those that a row does not have are dropped again."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
