"""Fixtures for all tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two workers on two cores: with two threads each, torch's threads wait for each other by spinning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.channel_fixtures import member_folder, start_target
from tests.support.s3 import s3_server, store

__all__ = ["member_folder", "s3_server", "start_target", "store"]
