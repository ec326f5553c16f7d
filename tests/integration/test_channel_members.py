"""Members in a real store: publishing, discovery, keys, replacement, and a whole link through it."""

import dataclasses
import threading

import pytest

from dflash import layout
from dflash.channel.client import HiddenStateClient
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.members import MemberDirectory
from dflash.channel.server import HiddenStateServer
from dflash.errors import ConfigurationError
from tests.support.channel_peers import IDENTITY, QUICK, faulty_capture, indexes, make_requests

pytestmark = pytest.mark.xdist_group("channel")


def test_members_are_published_found_and_withdrawn(store):
    directory = MemberDirectory(store, "run-1")
    assert directory.members() == []
    target = directory.publish("target", 3, KeyPair.generate(), host="10.0.0.7", control_port=4000)
    drafter = directory.publish("drafter", 0, KeyPair.generate(), attempt=2)
    assert store.get_json(layout.member("run-1", "target", 3)) == dataclasses.asdict(target)
    assert {member.name for member in directory.members()} == {"target-3", "drafter-0"}
    assert directory.targets() == [target]
    assert directory.public_keys() == {target.public_key, drafter.public_key}
    directory.withdraw(target)
    assert directory.targets() == []


def test_a_replacement_is_seen_and_not_withdrawn_by_the_process_before_it(store):
    directory = MemberDirectory(store, "run-1")
    first = directory.publish("target", 0, KeyPair.generate(), host="a", control_port=1)
    assert directory.targets() == [first]
    second = directory.publish("target", 0, KeyPair.generate(), host="b", control_port=2)
    directory.withdraw(first)
    assert directory.targets() == [second]


def test_what_is_no_member_is_left_out(store):
    directory = MemberDirectory(store, "run-1")
    store.put(layout.member("run-1", "target", 0), b"{")
    store.put_json(layout.member("run-1", "target", 1), {"role": "target"})
    good = directory.publish("target", 2, KeyPair.generate(), host="a", control_port=1)
    assert directory.members() == [good]


def test_a_link_through_the_store(store):
    keys = KeyPair.generate()
    directory = MemberDirectory(store, "run-1")
    capture = faulty_capture(IDENTITY, "", 0.0)
    server = HiddenStateServer(
        capture, IDENTITY, run="run-1", keys=keys, authority=Authority(directory.public_keys)
    )
    server.start()
    directory.publish("target", 0, keys, host="127.0.0.1", control_port=server.port)
    serving = threading.Thread(target=server.serve)
    serving.start()
    own = KeyPair.generate()
    directory.publish("drafter", 0, own, attempt=1)
    with HiddenStateClient(
        directory.targets, IDENTITY, run="run-1", attempt=1, index=0, keys=own, timeouts=QUICK
    ) as client:
        assert indexes(client.stream(iter(make_requests(40)))) == list(range(40))
    server.stop()
    serving.join(10)
    assert not serving.is_alive()


def test_an_address_of_another_machine_is_refused_at_once():
    server = HiddenStateServer(
        faulty_capture(IDENTITY, "", 0.0),
        IDENTITY,
        run="run-1",
        keys=KeyPair.generate(),
        authority=Authority(set),
        advertise="192.0.2.1",
    )
    with pytest.raises(ConfigurationError, match=r"192.0.2.1 is not an address of this machine"):
        server.start()
