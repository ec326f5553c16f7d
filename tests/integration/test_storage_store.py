"""The store against a real S3 server: what every other part relies on."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from dflash.storage import store as store_module
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.probe import probe
from dflash.storage.store import Corrupt, FileRecord, NotFound, Store


def test_an_object_is_written_read_listed_and_deleted(store: Store) -> None:
    store.put("a/one", b"1")
    store.put_json("a/two.json", {"b": 2, "a": [1]})
    assert store.get("a/one") == b"1"
    assert store.find_json("a/two.json") == {"a": [1], "b": 2}
    assert store.get("a/two.json") == b'{"a":[1],"b":2}'
    assert [(info.key, info.size) for info in store.list("a/")] == [("a/one", 1), ("a/two.json", 15)]
    assert store.exists("a/one")
    store.delete("a/one")
    store.delete("a/one")
    assert not store.exists("a/one")
    with pytest.raises(NotFound, match="a/one"):
        store.get("a/one")
    assert store.find_json("a/none.json") is None


def test_an_object_is_created_only_once(store: Store) -> None:
    assert store.create("once", b"first")
    assert not store.create("once", b"second")
    assert store.create("once", b"first"), "a repeated create finds its own bytes"
    assert store.get("once") == b"first"


def test_of_many_racing_creates_one_wins(store: Store) -> None:
    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(lambda racer: store.create("race", b"%d" % racer), range(32)))
    assert sum(won) == 1
    assert store.get("race") == b"%d" % won.index(True)


def test_a_swap_with_an_old_tag_is_refused(store: Store) -> None:
    first = store.swap("latest", b"1", None)
    assert first is not None
    assert store.swap("latest", b"other", None) is None
    second = store.swap("latest", b"2", first)
    assert second is not None
    assert store.read("latest") == (b"2", second)
    assert store.swap("latest", b"3", first) is None
    assert store.swap("latest", b"2", first) is None, "equal bytes of someone else are not a win"
    assert store.swap("never-written", b"1", first) is None


def test_a_counter_moved_by_swaps_loses_no_step(store: Store) -> None:
    store.put("counter", b"0")

    def add_ten(_: int) -> None:
        for _step in range(10):
            while True:
                data, etag = store.read("counter")
                if store.swap("counter", b"%d" % (int(data) + 1), etag):
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_ten, range(4)))
    assert store.get("counter") == b"40"


def test_a_listing_of_2500_objects_is_complete(store: Store) -> None:
    keys = [f"parts/{number:05d}.json" for number in range(2500)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.put(key, b"{}"), keys))
    assert [info.key for info in store.list("parts/")] == keys
    assert len(list(store.list("parts/01"))) == 1000


@pytest.mark.parametrize("size", [0, 1000, (70 << 20) + 5], ids=["empty", "small", "in parts"])
def test_a_file_comes_back_as_it_was(store: Store, tmp_path: Path, size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes((b"0123456789abcdef" * (size // 16 + 1))[:size])
    record = store.upload_file("files/one", source)
    assert (record.key, record.size) == ("files/one", size)
    store.download_file(record, tmp_path / "there" / "copy")
    assert (tmp_path / "there" / "copy").read_bytes() == source.read_bytes()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["copy"]


def test_a_file_that_is_not_the_recorded_one_is_refused(store: Store, tmp_path: Path) -> None:
    record = store.upload_file("files/one", Path(__file__))
    store.put("files/one", b"something else")
    with pytest.raises(Corrupt, match="files/one"):
        store.download_file(record, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFound, match="files/gone"):
        store.download_file(FileRecord("files/gone", 1, "0" * 64), tmp_path / "copy")


@pytest.mark.parametrize(
    "character", ["+", "%", "=", ":", " ", "ä", "&", "~", "(", "%2F", "Qwen3 8B+v1:test=ä%"]
)
def test_a_prefix_given_by_a_person_may_hold_any_character(s3_server: EmbeddedStore, character: str) -> None:
    location = s3_server.location.under(f"people/a{character}b")
    store = Store.open(location, s3_server.credentials, patience=5.0)
    store.check()
    assert store.create("one/x", b"1")
    assert store.get("one/x") == b"1"
    assert [info.key for info in store.list()] == ["one/x"]
    assert [info.key for info in store.list("one/")] == ["one/x"]
    store.delete("one/x")
    assert list(store.list()) == []


def test_a_check_leaves_nothing_behind(store: Store) -> None:
    store.check()
    assert list(store.list()) == []


def test_the_embedded_server_honours_conditional_writes(store: Store) -> None:
    result = probe(store)
    assert result.ok, result.missing
    assert list(store.list()) == []


@pytest.mark.parametrize("key", ["my prompts/ä+b 1.jsonl", "a%20b", "x:y=z&q?"])
def test_a_persons_own_file_is_read_whatever_its_name(
    store: Store, s3_server: EmbeddedStore, tmp_path: Path, key: str
) -> None:
    root = store.in_bucket(s3_server.location.bucket)
    full = f"{store.location.prefix}/{key}"
    store._client.put_object(Bucket=s3_server.location.bucket, Key=full, Body=b"theirs")
    assert [info.key for info in root.list(full)] == [full]
    assert root.get(full) == b"theirs"
    assert root.fetch(full, tmp_path / "copy").size == 6
    with pytest.raises(ValueError, match="unsafe key"):
        root.put(full, b"ours")


def test_a_check_ends_uploads_that_were_left_unfinished_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, client = store.location.bucket, store._client
    client.create_multipart_upload(Bucket=bucket, Key=f"{store.location.prefix}/left")

    def unfinished() -> int:
        found = client.list_multipart_uploads(Bucket=bucket, Prefix=store.location.prefix)
        return len(found.get("Uploads", []))

    store.check()
    assert unfinished() == 1, "it may be another process's that is still at work"
    monkeypatch.setattr(store_module, "_UNFINISHED_UPLOAD_AGE", timedelta(seconds=-60))
    store.check()
    assert unfinished() == 0
