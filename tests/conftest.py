"""Fixtures for all tests."""

from tests.support.s3 import s3_server, store

__all__ = ["s3_server", "store"]
