"""Fixtures of the channel's tests: a folder of members, and targets that end with the test.

Every test's conftest reads this, so torch is imported only by the tests that use it.
"""

import pytest


@pytest.fixture
def member_folder(tmp_path):
    from tests.support.channel_peers import Folder

    return Folder(tmp_path)


@pytest.fixture
def start_target(member_folder):
    """Starts targets and ends whatever is left of them."""
    from tests.support.channel_peers import Target

    started = []

    def start(index, fault="", *, wait=True, **options):
        target = Target(member_folder, index, fault, **options)
        started.append(target)
        return target.wait_listening() if wait else target

    yield start
    for target in started:
        if target.process.is_alive():
            target.kill()
