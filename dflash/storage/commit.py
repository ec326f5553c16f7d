"""Folders of files that are there completely or not at all: data first, COMMIT.json last.

COMMIT.json names each file with size and sha256; a folder without it does not exist for a reader, and
a file that differs from it is refused. Listings are never trusted. Not for single objects.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DflashError
from dflash.layout import COMMIT
from dflash.storage.keys import check_key
from dflash.storage.store import Corrupt, FileRecord, NotFound, Store, to_json


class CommitConflict(DflashError):  # noqa: N818
    """Another content was committed under the same folder."""


@dataclass(frozen=True)
class Commit:
    """A committed folder: its files by name, and what its writer noted beside them."""

    folder: str
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int
    sha256: str


class _Document(BaseModel):
    """What COMMIT.json holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = 1
    files: dict[str, _File]
    extra: dict[str, Any]


def write_commit(
    store: Store, folder_key: str, files: Mapping[str, Path | bytes], extra: Mapping[str, Any] | None = None
) -> Commit:
    """Upload `files` below `folder_key`, then commit them; doing so twice with equal content is fine.

    `extra` is JSON. CommitConflict when other content is committed there; it is left as it was.
    """
    folder = _folder(folder_key)
    for name in files:
        _check_name(name)
    document = _Document(
        files={name: _describe(source) for name, source in sorted(files.items())},
        extra=orjson.loads(to_json(dict(extra or {}))),
    )
    data = to_json(document.model_dump())
    standing = read_commit(store, folder)  # before any upload, so that committed files are never replaced
    ours = _commit(folder, document)
    if standing == ours:
        return ours
    if standing is None:
        for name, source in files.items():
            if isinstance(source, bytes):
                store.put(folder + name, source)
            else:
                record = store.upload_file(folder + name, source)
                if record.sha256 != document.files[name].sha256:
                    raise DflashError(
                        f"{source} changed while it was uploaded; write it once, then commit it"
                    )
        if store.create(folder + COMMIT, data):
            return ours
    raise CommitConflict(
        f"{store.location.uri}/{folder}{COMMIT} commits other content already; it was left as it is: "
        "a second writer is at work or an attempt number was used twice"
    )


def read_commit(store: Store, folder_key: str) -> Commit | None:
    """What is committed in a folder, or None. Corrupt when COMMIT.json cannot be read."""
    folder = _folder(folder_key)
    try:
        data = store.get(folder + COMMIT)
    except NotFound:
        return None
    try:
        document = _Document.model_validate_json(data)
        for name in document.files:
            _check_name(name)
    except (ValidationError, ValueError) as error:
        raise Corrupt(
            f"{store.location.uri}/{folder}{COMMIT} is not a commit ({str(error).splitlines()[0]}): delete "
            "this folder, then run again"
        ) from None
    return _commit(folder, document)


def fetch_commit(store: Store, folder_key: str, dest: Path) -> Commit:
    """Bring a committed folder's files to `dest`, each verified; files already there and right are kept.

    NotFound when nothing is committed or a file is gone, Corrupt when a file is not the committed one.
    """
    commit = read_commit(store, folder_key)
    if commit is None:
        raise NotFound(f"{store.location.uri}/{_folder(folder_key)} is not committed: it has no {COMMIT}")
    for name, record in commit.files.items():
        path = dest / name
        if not (
            path.is_file() and path.stat().st_size == record.size and _describe(path).sha256 == record.sha256
        ):
            store.download_file(record, path)
    return commit


def delete_commit(store: Store, folder_key: str) -> None:
    """Delete a folder: COMMIT.json first, so that no reader ever takes half of it for a whole."""
    folder = _folder(folder_key)
    store.delete(folder + COMMIT)
    for found in list(store.list(folder)):
        store.delete(found.key)


def _folder(folder_key: str) -> str:
    return folder_key.rstrip("/") + "/"


def _check_name(name: str) -> None:
    check_key(name)
    if name == COMMIT or PurePosixPath(name).is_absolute() or name.endswith("/"):
        raise ValueError(f"{name!r} cannot be a committed file's name")


def _describe(source: Path | bytes) -> _File:
    if isinstance(source, bytes):
        return _File(size=len(source), sha256=hashlib.sha256(source).hexdigest())
    with source.open("rb") as file:
        return _File(size=source.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _commit(folder: str, document: _Document) -> Commit:
    files = {name: FileRecord(folder + name, file.size, file.sha256) for name, file in document.files.items()}
    return Commit(folder, files, document.extra)
