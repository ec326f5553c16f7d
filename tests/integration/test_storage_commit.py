"""Committed folders: all of it or nothing, and never anything else than what was committed."""

import multiprocessing
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from dflash.layout import COMMIT
from dflash.storage.commit import CommitConflict, delete_commit, fetch_commit, read_commit, write_commit
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Corrupt, NotFound, Store


def test_a_folder_is_committed_read_and_fetched(store: Store, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"m" * 5000)
    written = write_commit(
        store, "export/", {"model.safetensors": tmp_path / "model", "sub/config.json": b"{}"}, {"step": 7}
    )
    read = read_commit(store, "export")
    assert read == written
    assert read is not None
    assert read.extra == {"step": 7}
    assert {name: (record.key, record.size) for name, record in read.files.items()} == {
        "model.safetensors": ("export/model.safetensors", 5000),
        "sub/config.json": ("export/sub/config.json", 2),
    }
    assert fetch_commit(store, "export", tmp_path / "dest") == written
    assert (tmp_path / "dest" / "model.safetensors").read_bytes() == b"m" * 5000
    assert (tmp_path / "dest" / "sub" / "config.json").read_bytes() == b"{}"


def test_files_without_a_commit_do_not_exist(store: Store, tmp_path: Path) -> None:
    store.put("export/model.safetensors", b"m")
    assert read_commit(store, "export") is None
    with pytest.raises(NotFound, match="export/ is not committed"):
        fetch_commit(store, "export", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_commit_is_the_last_object_written(store: Store, tmp_path: Path) -> None:
    order: list[str] = []

    class Watched(Store):
        def put(self, key: str, data: bytes) -> str:
            order.append(key)
            return super().put(key, data)

        def create(self, key: str, data: bytes) -> bool:
            order.append(key)
            return super().create(key, data)

    (tmp_path / "b").write_bytes(b"2")
    watched = Watched(store.location, store._credentials, 5.0, store._client)
    write_commit(watched, "folder", {"a": b"1", "b": tmp_path / "b"})
    assert order == ["folder/a", "folder/b", f"folder/{COMMIT}"]


def test_committing_the_same_again_is_fine_and_something_else_is_refused(
    store: Store, tmp_path: Path
) -> None:
    first = write_commit(store, "folder", {"a": b"1"}, {"attempt": 0})
    assert write_commit(store, "folder", {"a": b"1"}, {"attempt": 0}) == first
    with pytest.raises(CommitConflict, match=f"folder/{COMMIT} commits other content"):
        write_commit(store, "folder", {"a": b"2"}, {"attempt": 0})
    with pytest.raises(CommitConflict):
        write_commit(store, "folder", {"a": b"1"}, {"attempt": 1})
    fetch_commit(store, "folder", tmp_path)
    assert (tmp_path / "a").read_bytes() == b"1", "what was committed is as it was"


@pytest.mark.parametrize("harm", ["torn", "changed", "gone"])
def test_a_harmed_file_is_refused_with_its_key(store: Store, tmp_path: Path, harm: str) -> None:
    data = secrets.token_bytes(100_000)
    write_commit(store, "folder", {"weights": data, "config": b"{}"})
    if harm == "torn":
        store.put("folder/weights", data[:50_000])
    elif harm == "changed":
        store.put("folder/weights", data[:-1] + bytes([data[-1] ^ 1]))
    else:
        store.delete("folder/weights")
    with pytest.raises((Corrupt, NotFound), match="folder/weights"):
        fetch_commit(store, "folder", tmp_path)
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b'{"files":{}}',
        b'{"format":1,"files":{"../x":{"size":1,"sha256":"a"}},"extra":{}}',
        b'{"format":1,"files":{"/x":{"size":1,"sha256":"a"}},"extra":{}}',
        b'{"format":1,"files":{"x":{"size":"1","sha256":"a"}},"extra":{}}',
    ],
)
def test_a_harmed_commit_is_refused_with_its_key(store: Store, tmp_path: Path, document: bytes) -> None:
    store.put(f"folder/{COMMIT}", document)
    with pytest.raises(Corrupt, match=f"folder/{COMMIT}"):
        fetch_commit(store, "folder", tmp_path / "dest")
    assert not (tmp_path / "x").exists()


def test_a_fetch_keeps_right_files_and_replaces_wrong_ones(store: Store, tmp_path: Path) -> None:
    write_commit(store, "folder", {"right": b"right", "wrong": b"wrong"})
    fetch_commit(store, "folder", tmp_path)
    (tmp_path / "wrong").write_bytes(b"WRONG")
    kept = (tmp_path / "right").stat().st_ino
    fetch_commit(store, "folder", tmp_path)
    assert (tmp_path / "wrong").read_bytes() == b"wrong"
    assert (tmp_path / "right").stat().st_ino == kept


def test_of_two_writers_of_different_content_one_commits(store: Store) -> None:
    def write(writer: int) -> bool:
        try:
            write_commit(store, "folder", {f"by-{writer}": b"%d" % writer})
        except CommitConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert sum(won) == 1
    commit = read_commit(store, "folder")
    assert commit is not None
    assert list(commit.files) == [f"by-{won.index(True)}"]


def test_deleting_takes_the_commit_first_and_leaves_nothing(store: Store) -> None:
    write_commit(store, "folder", {"a": b"1", "sub/b": b"2"})
    write_commit(store, "folder-2", {"a": b"1"})
    deleted: list[str] = []

    class Watched(Store):
        def delete(self, key: str) -> None:
            deleted.append(key)
            super().delete(key)

    delete_commit(Watched(store.location, store._credentials, 5.0, store._client), "folder")
    assert deleted[0] == f"folder/{COMMIT}"
    assert list(store.list("folder/")) == []
    assert read_commit(store, "folder-2") is not None


def test_extra_may_hold_any_json(store: Store) -> None:
    extra = {"list": [1, 2.5, None, "ä"], "nested": {"b": 1, "a": True}}
    write_commit(store, "folder", {}, extra)
    commit = read_commit(store, "folder")
    assert commit is not None
    assert commit.extra == extra
    assert orjson.loads(store.get(f"folder/{COMMIT}"))["format"] == 1


def _write_until_killed(server: EmbeddedStore, prefix: str, size: int) -> None:
    store = server.store(patience=5.0).under(prefix)
    write_commit(store, "folder", {f"part-{number}": bytes([number]) * size for number in range(40)})


def test_a_writer_killed_anywhere_leaves_all_or_nothing(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path
) -> None:
    prefix = store.location.prefix
    context = multiprocessing.get_context("fork")
    outcomes = set()
    for delay in (0.05, 0.2, 0.4, 5.0):
        name = f"kill-{int(delay * 100)}"
        writer = context.Process(target=_write_until_killed, args=(s3_server, f"{prefix}-{name}", 200_000))
        writer.start()
        writer.join(delay)
        writer.kill()
        writer.join()
        reader = s3_server.store(patience=5.0)
        reader = Store(reader.location.under(f"{prefix}-{name}"), reader._credentials, 5.0, reader._client)
        commit = read_commit(reader, "folder")
        outcomes.add(commit is not None)
        if commit is not None:
            fetch_commit(reader, "folder", tmp_path / name)
            assert len(list((tmp_path / name).iterdir())) == 40
    assert outcomes == {True, False}
