"""Where a store is: every way of writing it becomes one form or is refused with an example."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.errors import ConfigurationError
from dflash.resource.storage import Storage
from dflash.storage.keys import check_key, safe_name
from dflash.storage.location import StoreLocation, is_local, location_of, normalise_endpoint
from dflash.storage.store import Credentials, Store


def _location(uri: str = "s3://bucket/prefix", **more: Any) -> StoreLocation:
    return location_of(Storage(uri=uri, **more), environment={})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://h:9000", "http://h:9000"),
        ("http://h:9000/", "http://h:9000"),
        ("https://h", "https://h"),
        ("https://h///", "https://h"),
        ("h:9000", "http://h:9000"),
        ("h:443", "https://h:443"),
        ("10.0.0.7:9000", "http://10.0.0.7:9000"),
        ("http://[::1]:9000", "http://[::1]:9000"),
        ("http://minio.store.svc.cluster.local:9000", "http://minio.store.svc.cluster.local:9000"),
        ("https://project.example.com/storage/v1/s3/", "https://project.example.com/storage/v1/s3"),
        ("  http://h:9000 ", "http://h:9000"),
    ],
)
def test_an_endpoint_has_one_form(written: str, meant: str) -> None:
    assert normalise_endpoint(written, "bucket") == meant
    assert _location(endpoint=written).endpoint == meant


@pytest.mark.parametrize(
    "written",
    [
        "minio",
        "minio/path",
        "ftp://h",
        "http://",
        "http://h:port",
        "http://h:99999",
        "http://h?x=1",
        "http://h#x",
    ],
)
def test_an_endpoint_that_cannot_be_meant_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.storage\.endpoint.*http://minio:9000"):
        _location(endpoint=written)


def test_an_endpoint_that_ends_with_the_bucket_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigurationError, match=r"write https://acct\.r2\.example\.com$"):
        _location("s3://models/x", endpoint="https://acct.r2.example.com/models")


def test_credentials_in_an_endpoint_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID") as refused:
        _location(endpoint="http://key:hidden@h:9000")
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b/", "bucket", "a/b"),
        ("s3://my.bucket-1/Qwen3 8B+v1:test=ä%", "my.bucket-1", "Qwen3 8B+v1:test=ä%"),
    ],
)
def test_a_uri_is_bucket_and_prefix(uri: str, bucket: str, prefix: str) -> None:
    location = _location(uri)
    assert (location.bucket, location.prefix) == (bucket, prefix)
    assert location.uri == uri.rstrip("/")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///x",
        "s3://b",
        "s3://a b/x",
        "gs://bucket/x",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "s3://bucket/a\nb",
    ],
)
def test_a_uri_that_cannot_be_meant_is_refused_with_an_example(uri: str) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.storage\.uri.*s3://bucket/prefix"):
        _location(uri)


def test_the_bucket_is_in_the_path_for_servers_other_than_aws_unless_told_otherwise() -> None:
    assert _location().addressing_style == "virtual"
    assert _location(endpoint="https://s3.eu-west-1.amazonaws.com").addressing_style == "virtual"
    assert _location(endpoint="http://h:9000").addressing_style == "path"
    assert _location(endpoint="http://h:9000", addressing_style="virtual").addressing_style == "virtual"
    assert _location(addressing_style="path").addressing_style == "path"


def test_endpoint_and_region_default_to_the_environment() -> None:
    environment = {
        "AWS_ENDPOINT_URL": "http://other:1",
        "AWS_ENDPOINT_URL_S3": "http://minio:9000/",
        "AWS_DEFAULT_REGION": "eu-west-3",
        "AWS_REGION": "eu-north-1",
    }
    location = location_of(Storage(uri="s3://bucket"), environment)
    assert (location.endpoint, location.region) == ("http://minio:9000", "eu-north-1")
    declared = location_of(Storage(uri="s3://bucket", endpoint="h:1", region="x"), environment)
    assert (declared.endpoint, declared.region) == ("http://h:1", "x")


def test_a_folder_of_this_machine_is_local() -> None:
    assert is_local("state")
    assert is_local("/var/state")
    assert is_local("file:///var/state")
    assert not is_local("s3://bucket")


@pytest.mark.parametrize(
    ("endpoint", "style", "url"),
    [
        ("http://10.0.0.7:9000", "auto", "http://10.0.0.7:9000/bucket/p/k"),
        ("http://minio:9000", "auto", "http://minio:9000/bucket/p/k"),
        ("https://h", "auto", "https://h/bucket/p/k"),
        ("https://h/storage/v1/s3", "auto", "https://h/storage/v1/s3/bucket/p/k"),
        ("https://h:8443", "virtual", "https://bucket.h:8443/p/k"),
    ],
)
def test_requests_go_to_the_right_url_without_chunks_or_checksums(
    endpoint: str, style: Any, url: str
) -> None:
    sent: list[Any] = []

    class Sent(Exception):
        pass

    def keep(request: Any, **_: Any) -> None:
        sent.append(request)
        raise Sent

    location = _location("s3://bucket/p", endpoint=endpoint, addressing_style=style)
    store = Store.open(location, Credentials("a", "b"))
    store._client.meta.events.register("before-send.s3", keep)
    with pytest.raises(Sent):
        store.put("k", b"data")
    assert sent[0].url == url
    names = {name.lower() for name in sent[0].headers}
    assert not {name for name in names if "checksum" in name or "trailer" in name}
    assert b"aws-chunked" not in sent[0].headers.get("Content-Encoding", b"")


@given(st.text())
def test_any_text_becomes_a_safe_name(text: str) -> None:
    assert check_key(safe_name(text)) == safe_name(text)
    assert "/" not in safe_name(text)


def test_names_that_differ_only_in_unsafe_characters_stay_different() -> None:
    names = {safe_name(text) for text in ("a b", "a+b", "a%b", "a-b", "a/b", "a:b")}
    assert len(names) == 6
    assert safe_name("qwen3-8b.v1") == "qwen3-8b.v1"
    long = "x" * 300
    assert safe_name(long).endswith(hashlib.sha256(long.encode()).hexdigest()[:10])


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a b", "a+b", "../a", "a/./b", "ä", "a?b", "a\n"])
def test_an_unsafe_key_is_a_mistake_of_the_caller(key: str) -> None:
    with pytest.raises(ValueError, match="unsafe key"):
        check_key(key)
