"""A real S3 server for tests: one embedded SeaweedFS a session, a fresh prefix a test."""

import secrets
from collections.abc import Iterator

import pytest

from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    """A running server; `.location`, `.credentials` and `.environment` are what a client needs."""
    with EmbeddedStore(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def store(s3_server: EmbeddedStore) -> Store:
    """An empty store; gives up after seconds, so that a broken test ends soon."""
    return s3_server.store(patience=10.0).under(f"test-{secrets.token_hex(6)}")
