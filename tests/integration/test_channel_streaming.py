"""Targets and drafters as real processes, with nothing going wrong: order, balance, sharing, memory."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from dflash.channel.interface import Request
from tests.support.channel_peers import IDENTITY, check, connect, indexes, make_requests

pytestmark = pytest.mark.xdist_group("channel")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("final", [True, False])
def test_every_number_arrives_in_order(member_folder, start_target, dtype, final):
    identity = dataclasses.replace(IDENTITY, dtype=dtype, final=final)
    start_target(0, identity={"dtype": dtype, "final": final}, checksum_every=1)
    with connect(member_folder, identity=identity) as client:
        replies = list(client.stream(iter(make_requests(100))))
        for reply in replies:
            check(reply, identity)
        assert [reply.request.index for reply in replies] == list(range(100))
        stats = client.stats()
    assert (stats.requested, stats.reissued, stats.delivered, stats.depth) == (100, 0, 100, 0)


def test_several_targets_share_the_work(member_folder, start_target):
    for index in range(3):
        start_target(index, pace=0.002, token_budget=100)
    with connect(member_folder, queue_depth=30) as client:
        assert indexes(client.stream(iter(make_requests(200)))) == list(range(200))
        delivered = [target.delivered for target in client.stats().targets]
    assert sum(delivered) == 200
    assert min(delivered) > 20


def test_a_slow_target_gets_less_and_holds_nobody_up(member_folder, start_target):
    start_target(0, pace=0.15, token_budget=64)  # much, so that it shows on a busy machine too
    start_target(1, pace=0.002, token_budget=64)
    with connect(member_folder, queue_depth=40) as client:
        assert indexes(client.stream(iter(make_requests(150)))) == list(range(150))
        by_name = {target.name: target.delivered for target in client.stats().targets}
    assert by_name["target-1"] > 3 * by_name["target-0"]


def test_several_drafters_share_one_target(member_folder, start_target):
    target = start_target(0)
    seen = {}

    def drafter(index):
        with connect(member_folder, index=index) as client:
            seen[index] = indexes(client.stream(iter(make_requests(120, seed=index))))

    threads = [threading.Thread(target=drafter, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {index: list(range(120)) for index in range(3)}
    assert target.finish()["samples"] == 360


def test_the_window_bounds_what_is_requested_or_ready(member_folder, start_target):
    start_target(0)
    read = []

    def requests():
        for request in make_requests(60):
            read.append(request.index)
            yield request

    with connect(member_folder, queue_depth=7) as client:
        stream = client.stream(requests())
        for count in range(20):
            check(next(stream))
            time.sleep(0.01)
            # one more is read than fits: it waits for its place outside the window
            assert len(read) <= count + 1 + 7 + 1
            assert client.stats().depth <= 7
        assert [reply.request.index for reply in stream] == list(range(20, 60))


def test_one_stream_follows_another(member_folder, start_target):
    start_target(0)
    with connect(member_folder) as client:
        for seed in range(3):
            assert indexes(client.stream(iter(make_requests(30, seed=seed)))) == list(range(30))
        assert indexes(client.stream(iter([]))) == []
        assert client.stats().delivered == 90


def test_a_sample_longer_than_the_token_budget_goes_alone(member_folder, start_target):
    start_target(0, token_budget=50)
    long = Request(0, "long", np.arange(500, dtype=np.int32))
    with connect(member_folder) as client:
        (reply,) = client.stream(iter([long]))
        check(reply)


def test_an_error_in_the_requests_reaches_the_consumer(member_folder, start_target):
    start_target(0)

    def requests():
        yield from make_requests(3)
        raise OSError("part 7 could not be read")

    with connect(member_folder) as client, pytest.raises(OSError, match="part 7"):
        list(client.stream(requests()))


def test_a_target_says_how_idle_it_is(member_folder, start_target):
    start_target(0)
    with connect(member_folder) as client:
        stream = client.stream(iter(make_requests(100)))
        next(stream)
        time.sleep(0.5)
        (target,) = client.stats().targets
        assert target.idle_share > 0.5
