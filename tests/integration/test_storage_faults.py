"""The store while the server or the network fails: a real server behind a proxy that breaks requests."""

import hashlib
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash.errors import ConfigurationError, TemporaryError
from dflash.resource.storage import Storage
from dflash.storage import faults
from dflash.storage import store as store_module
from dflash.storage.commit import fetch_commit, write_commit
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.location import StoreLocation, location_of
from dflash.storage.probe import probe
from dflash.storage.store import Corrupt, Credentials, Store
from tests.support.faulty_s3_proxy import Exchange, FaultyProxy, faulty_proxy, s3_error

Forward = Callable[[], None]


@pytest.fixture
def proxy(s3_server: EmbeddedStore) -> Iterator[FaultyProxy]:
    with faulty_proxy(str(s3_server.location.endpoint)) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: FaultyProxy, s3_server: EmbeddedStore) -> Store:
    """A store whose requests go through the proxy."""
    location = s3_server.location.model_copy(update={"endpoint": proxy.endpoint, "folder": None})
    return Store.open(location.under(f"test-{secrets.token_hex(6)}"), s3_server.credentials, patience=8.0)


def test_no_body_is_chunked_and_no_checksum_is_added_off_aws(
    proxy: FaultyProxy, through: Store, tmp_path: Path
) -> None:
    def refuse_what_many_servers_refuse(exchange: Exchange, forward: Forward) -> tuple[int, bytes] | None:
        names = {name.lower(): value for name, value in exchange.headers.items()}
        if "aws-chunked" in names.get("content-encoding", "") or "x-amz-trailer" in names:
            return s3_error(501, "NotImplemented", "aws-chunked")
        if any(name.startswith(("x-amz-checksum", "x-amz-sdk-checksum")) for name in names):
            return s3_error(400, "InvalidArgument", "unknown checksum header")
        return None

    proxy.fault = refuse_what_many_servers_refuse
    through.check()
    (tmp_path / "large").write_bytes(b"x" * (33 << 20))
    record = through.upload_file("large", tmp_path / "large")
    through.download_file(record, tmp_path / "copy")
    assert through.create("once", b"1")
    assert probe(through).ok


def test_a_storm_of_slow_downs_is_waited_out(proxy: FaultyProxy, through: Store) -> None:
    chance = random.Random(1)
    proxy.fault = lambda exchange, forward: (
        s3_error(503, "SlowDown") if exchange.method == "PUT" and chance.random() < 0.5 else None
    )
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: through.put(f"parts/{number}", b"%d" % number), range(40)))
    assert {info.key for info in through.list("parts/")} == {f"parts/{number}" for number in range(40)}


def test_pauses_grow_and_last_minutes_by_default() -> None:
    assert store_module.PATIENCE_SECONDS >= 120
    pauses = [store_module._FIRST_PAUSE_SECONDS * 2**attempt for attempt in range(5)]
    assert pauses[-1] > 2
    assert store_module._LONGEST_PAUSE_SECONDS >= 10


def test_a_lasting_outage_ends_with_server_operation_and_key(proxy: FaultyProxy, through: Store) -> None:
    proxy.fault = lambda exchange, forward: s3_error(503, "SlowDown")
    impatient = Store.open(through.location, through._credentials, patience=1.0)
    started = time.monotonic()
    with pytest.raises(TemporaryError, match=r"put of s3://.*/parts/1 at http://127.*SlowDown"):
        impatient.put("parts/1", b"1")
    assert time.monotonic() - started < 3
    assert 3 <= proxy.count("PUT") <= 8, "tried again, but not at once"


def test_a_create_whose_answer_was_lost_is_a_success(proxy: FaultyProxy, through: Store) -> None:
    lost: list[str] = []

    def lose_first_answer(exchange: Exchange, forward: Forward) -> bytes | None:
        if exchange.method == "PUT" and not lost:
            forward()
            lost.append(exchange.path)
            return b""
        return None

    proxy.fault = lose_first_answer
    assert through.create("manifest.json", b"ours")
    assert lost
    assert proxy.count("PUT") == 2
    assert not through.create("manifest.json", b"theirs")


def test_a_create_whose_answer_was_lost_and_that_someone_beat_is_no_success(
    proxy: FaultyProxy, through: Store, s3_server: EmbeddedStore
) -> None:
    direct = Store.open(
        through.location.model_copy(update={"endpoint": s3_server.location.endpoint}), s3_server.credentials
    )
    beaten: list[bool] = []

    def beat_it(exchange: Exchange, forward: Forward) -> bytes | None:
        if exchange.method == "PUT" and not beaten:
            beaten.append(direct.create("manifest.json", b"theirs"))
            return b""
        return None

    proxy.fault = beat_it
    assert not through.create("manifest.json", b"ours")
    assert beaten == [True]
    assert through.get("manifest.json") == b"theirs"


@pytest.mark.parametrize("status", [500, None], ids=["an error instead", "no answer"])
def test_a_swap_whose_answer_was_lost_is_a_success(
    proxy: FaultyProxy, through: Store, status: int | None
) -> None:
    etag = through.put("LATEST.json", b"1")
    lost: list[str] = []

    def lose_first_answer(exchange: Exchange, forward: Forward) -> bytes | tuple[int, bytes] | None:
        if exchange.method == "PUT" and not lost:
            forward()
            lost.append(exchange.path)
            return b"" if status is None else s3_error(status, "InternalError")
        return None

    proxy.fault = lose_first_answer
    new = through.swap("LATEST.json", b"2", etag)
    assert new is not None
    assert through.read("LATEST.json") == (b"2", new)
    assert through.swap("LATEST.json", b"3", new) is not None


def test_a_conflict_is_tried_again(proxy: FaultyProxy, through: Store) -> None:
    conflicts = iter([True, True])
    proxy.fault = lambda exchange, forward: (
        s3_error(409, "ConditionalRequestConflict")
        if exchange.method == "PUT" and next(conflicts, False)
        else None
    )
    assert through.create("raced", b"1")
    assert proxy.count("PUT") == 3


def test_a_connection_that_breaks_in_a_download_is_continued(
    proxy: FaultyProxy, through: Store, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(secrets.token_bytes(5 << 20))
    record = through.upload_file("file", source)
    breaks = iter([True, True])

    def tear(exchange: Exchange, forward: Forward) -> None:
        if exchange.method == "GET" and next(breaks, False):
            forward()
            exchange.answer_headers.append(("X-Claimed-Length", str(len(exchange.answer))))
            exchange.answer = exchange.answer[: 2 << 20]

    proxy.fault = tear
    through.download_file(record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert [one.headers.get("Range") for one in proxy.seen if one.method == "GET"][1:] != [None, None]


def test_parts_of_an_upload_are_tried_again_one_by_one(
    proxy: FaultyProxy, through: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PART_BYTES", 5 << 20)
    source = tmp_path / "source"
    source.write_bytes(secrets.token_bytes(21 << 20))
    failed: set[str] = set()

    def fail_each_part_once(exchange: Exchange, forward: Forward) -> tuple[int, bytes] | None:
        if "partNumber=" in exchange.path and exchange.path not in failed:
            failed.add(exchange.path)
            return s3_error(503, "SlowDown")
        return None

    proxy.fault = fail_each_part_once
    record = through.upload_file("file", source)
    assert len(failed) == 5
    assert proxy.count("PUT", "partNumber=") == 10
    through.download_file(record, tmp_path / "copy")


@pytest.mark.parametrize("part_mebibytes", [5, 8])
def test_the_recorded_hash_does_not_depend_on_the_part_size(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_mebibytes: int
) -> None:
    monkeypatch.setattr(store_module, "_PART_BYTES", part_mebibytes << 20)
    source = tmp_path / "source"
    source.write_bytes(b"\x07" * (20 << 20))
    record = store.upload_file("file", source)
    assert record.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    store.download_file(record, tmp_path / "copy")


def test_an_upload_completed_without_an_answer_is_a_success(
    proxy: FaultyProxy, through: Store, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"y" * (33 << 20))
    lost: list[str] = []

    def lose_completion(exchange: Exchange, forward: Forward) -> bytes | None:
        if exchange.method == "POST" and "uploadId=" in exchange.path and not lost:
            forward()
            lost.append(exchange.path)
            return b""
        return None

    proxy.fault = lose_completion
    record = through.upload_file("file", source)
    through.download_file(record, tmp_path / "copy")
    assert lost


def test_an_upload_that_fails_leaves_no_parts_behind(
    proxy: FaultyProxy, through: Store, s3_server: EmbeddedStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"y" * (33 << 20))
    proxy.fault = lambda exchange, forward: (
        s3_error(403, "AccessDenied") if "partNumber=2" in exchange.path else None
    )
    with pytest.raises(ConfigurationError, match="AccessDenied"):
        through.upload_file("file", source)
    client = through._client
    proxy.fault = lambda exchange, forward: None
    left = client.list_multipart_uploads(Bucket=s3_server.location.bucket, Prefix=through.location.prefix)
    assert not left.get("Uploads")


def test_a_listing_that_drops_a_page_does_not_make_a_committed_folder_smaller(
    proxy: FaultyProxy, through: Store, tmp_path: Path
) -> None:
    names = {f"part-{number}": b"%d" % number for number in range(5)}
    write_commit(through, "folder", names)
    proxy.fault = lambda exchange, forward: (
        (200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        if "list-type=2" in exchange.path
        else None
    )
    assert list(through.list("folder")) == []
    commit = fetch_commit(through, "folder", tmp_path)
    assert set(commit.files) == set(names)
    assert {path.name for path in tmp_path.iterdir()} == set(names)


@pytest.mark.parametrize("token", ["", "<NextContinuationToken>same</NextContinuationToken>"])
def test_a_listing_that_cannot_be_continued_is_an_error(
    proxy: FaultyProxy, through: Store, token: str
) -> None:
    page = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>".encode()
    proxy.fault = lambda exchange, forward: (200, page)
    with pytest.raises(Corrupt, match="no way to get it"):
        list(through.list())


def test_a_listing_that_changes_keys_is_an_error(proxy: FaultyProxy, s3_server: EmbeddedStore) -> None:
    location = s3_server.location.model_copy(update={"endpoint": proxy.endpoint}).under("a b")
    entry = "<Contents><Key>a-plus-b/x</Key><Size>1</Size><ETag>e</ETag></Contents>"
    page = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entry}</ListBucketResult>".encode()
    proxy.fault = lambda exchange, forward: (200, page)
    with pytest.raises(Corrupt, match="a-plus-b/x"):
        list(Store.open(location, s3_server.credentials).list())


@pytest.mark.parametrize("credentials", ["key", "secret"])
def test_wrong_credentials_are_told_at_once_with_their_variables(
    s3_server: EmbeddedStore, credentials: str
) -> None:
    right = s3_server.credentials
    wrong = (
        Credentials("NOBODY", right.secret_access_key)
        if credentials == "key"
        else Credentials(right.access_key_id, "wrong")
    )
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"AWS_ACCESS_KEY_ID.*secretRef"):
        Store.open(s3_server.location, wrong).check()
    assert time.monotonic() - started < 5


def test_missing_credentials_are_told_with_their_variables(
    s3_server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigurationError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
        Store.open(s3_server.location).get("x")


def test_a_profile_that_does_not_exist_is_a_configuration_error(
    s3_server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigurationError, match="nobody"):
        Store.open(s3_server.location)


def test_children_of_the_embedded_server_need_only_its_environment(
    s3_server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    location = location_of(Storage(uri=f"s3://{s3_server.location.bucket}/child-{secrets.token_hex(4)}"))
    assert location.folder == s3_server.folder
    Store.open(location).check()


def test_a_bucket_that_does_not_exist_is_told_with_how_to_make_it(s3_server: EmbeddedStore) -> None:
    location = s3_server.location.model_copy(update={"bucket": "no-such-bucket"})
    missing = Store.open(location, s3_server.credentials)
    for use in (
        missing.check,
        lambda: missing.put("a", b"1"),
        lambda: missing.get("a"),
        lambda: list(missing.list()),
    ):
        with pytest.raises(
            ConfigurationError, match=r"'no-such-bucket' does not exist.* s3 mb s3://no-such-bucket"
        ):
            use()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_there_is_told_within_the_check_deadline() -> None:
    endpoint = f"http://127.0.0.1:{_free_port()}"
    location = StoreLocation(bucket="bucket", endpoint=endpoint, addressing_style="path")
    started = time.monotonic()
    with pytest.raises(TemporaryError, match=rf"list of s3://bucket/.* at {endpoint}"):
        Store.open(location, Credentials("a", "b")).check(deadline=2.0)
    assert time.monotonic() - started < 4


def test_a_server_that_accepts_and_says_nothing_is_told_within_the_check_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        location = StoreLocation(bucket="bucket", endpoint=endpoint, addressing_style="path")
        started = time.monotonic()
        with pytest.raises(TemporaryError, match=endpoint):
            Store.open(location, Credentials("a", "b")).check(deadline=2.0)
        assert time.monotonic() - started < 5


def test_the_impatient_do_not_wait_a_minute_for_a_server_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "_LEAST_READ_TIMEOUT_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        place = location_of(Storage(uri="s3://bucket/x", endpoint=endpoint), {})
        started = time.monotonic()
        with pytest.raises(TemporaryError):
            Store.open(place, Credentials("a", "b"), patience=1.0).get("x")
        assert time.monotonic() - started < 10.0


def test_a_server_that_lacks_something_is_told_at_once(proxy: FaultyProxy, through: Store) -> None:
    proxy.fault = lambda exchange, forward: s3_error(501, "NotImplemented", "A header you provided")
    with pytest.raises(ConfigurationError, match=r"NotImplemented.*A header you provided"):
        through.put("a", b"1")
    assert proxy.count("PUT") == 1


def test_bytes_that_came_back_changed_fail_the_check(proxy: FaultyProxy, through: Store) -> None:
    def add_trailer(exchange: Exchange, forward: Forward) -> None:
        forward()
        if exchange.method == "GET" and "list-type" not in exchange.path:
            exchange.answer += b"\r\nx-amz-checksum-crc32:abc"

    proxy.fault = add_trailer
    with pytest.raises(ConfigurationError, match="other bytes than were written"):
        through.check()


def test_a_full_disk_of_the_embedded_server_is_told_soon(
    proxy: FaultyProxy, s3_server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = s3_server.location.model_copy(update={"endpoint": proxy.endpoint}).under("full")
    proxy.fault = lambda exchange, forward: s3_error(500, "InternalError")
    monkeypatch.setattr(faults, "free_bytes", lambda folder: 5 << 20)
    monkeypatch.setattr(store_module, "_DISK_FULL_PATIENCE_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(TemporaryError, match=f"^disk full: .*{s3_server.folder}"):
        Store.open(location, s3_server.credentials).put("a", b"1")
    assert time.monotonic() - started < 5


def test_a_server_without_conditional_writes_is_found_by_the_probe(
    proxy: FaultyProxy, through: Store, s3_server: EmbeddedStore
) -> None:
    direct = Store.open(
        through.location.model_copy(update={"endpoint": s3_server.location.endpoint}), s3_server.credentials
    )

    def ignore_conditions(exchange: Exchange, forward: Forward) -> None:
        names = {name.lower() for name in exchange.headers}
        if exchange.method == "PUT" and names & {"if-match", "if-none-match"}:
            key = exchange.path.split(through.location.prefix + "/", 1)[1].split("?")[0]
            exchange.status, exchange.answer_headers = 200, [("ETag", direct.put(key, exchange.body))]

    proxy.fault = ignore_conditions
    result = probe(through)
    assert not result.create_once
    assert not result.compare_and_swap
    assert result.listing
    assert [("If-None-Match" in said, "If-Match" in said) for said in result.missing] == [
        (True, False),
        (False, True),
    ]


def test_an_object_replaced_while_a_download_broke_is_not_mixed_with_the_old_one(
    proxy: FaultyProxy, through: Store, tmp_path: Path
) -> None:
    through.put("prompts", b"a" * (3 << 20))
    breaks = iter([True])

    def tear_and_replace(exchange: Exchange, forward: Forward) -> None:
        if exchange.method == "GET" and next(breaks, False):
            forward()
            exchange.answer_headers.append(("X-Claimed-Length", str(len(exchange.answer))))
            exchange.answer = exchange.answer[: 2 << 20]
            through.put("prompts", b"b" * (3 << 20))

    proxy.fault = tear_and_replace
    through.fetch("prompts", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"b" * (3 << 20)
