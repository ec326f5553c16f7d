"""Fixtures for all tests."""

from tests.support.channel_fixtures import member_folder, start_target
from tests.support.s3 import s3_server, store

__all__ = ["member_folder", "s3_server", "start_target", "store"]
