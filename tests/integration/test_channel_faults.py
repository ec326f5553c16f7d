"""What can go wrong on either side, with real processes: each has its outcome, none hangs, none is silent."""

import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time

import pytest
import zmq

from dflash.channel.keys import KeyPair
from dflash.errors import DflashError, Preempted, TemporaryError
from tests.support.channel_peers import QUICK, check, connect, indexes, make_requests, start_drafter

pytestmark = pytest.mark.xdist_group("channel")


def paced(stream, seconds):
    """A consumer that takes its time."""
    for reply in stream:
        time.sleep(seconds)
        yield reply


def longest_gap(stream):
    """Order of the samples, and the longest wait for one."""
    seen, gap, last = [], 0.0, None
    for reply in stream:
        check(reply)
        now = time.monotonic()
        gap = max(gap, now - last) if last is not None else 0.0
        last = now
        seen.append(reply.request.index)
    return seen, gap


def read_until(stream, done, seconds):
    """Read until something is so; the order of what was read."""
    seen = []
    deadline = time.monotonic() + seconds
    for reply in stream:
        check(reply)
        seen.append(reply.request.index)
        if done():
            return seen
        assert time.monotonic() < deadline, "it did not happen in time"
    raise AssertionError("the stream ended first")


# Targets that die


@pytest.mark.parametrize("fault", ["die mid-compute", "die mid-send"])
def test_a_target_that_dies_at_work_costs_nothing_but_a_moment(member_folder, start_target, fault):
    dying = start_target(0, fault, token_budget=100, pace=0.002)
    start_target(1, token_budget=100, pace=0.002)
    with connect(member_folder, queue_depth=30) as client:
        seen, gap = longest_gap(client.stream(iter(make_requests(200))))
        stats = client.stats()
    assert dying.process.exitcode == -signal.SIGKILL
    assert seen == list(range(200))
    assert gap < 2.0
    assert stats.reissued > 0
    assert stats.links_lost == 1


def test_a_target_killed_from_outside_in_the_middle(member_folder, start_target):
    dying = start_target(0, token_budget=100, pace=0.003)
    start_target(1, token_budget=100, pace=0.003)
    with connect(member_folder, queue_depth=30) as client:
        stream = client.stream(iter(make_requests(300)))
        head = [next(stream).request.index for _ in range(60)]
        dying.kill()
        seen, gap = longest_gap(stream)
        assert client.stats().reissued > 0
    assert head + seen == list(range(300))
    assert gap < 2.0


def test_a_target_that_died_before_hello_is_passed_over(member_folder, start_target):
    start_target(0).kill()  # its member stays behind
    start_target(1)
    with connect(member_folder) as client:
        began = time.monotonic()
        assert indexes(client.stream(iter(make_requests(50)))) == list(range(50))
        assert time.monotonic() - began < 5.0


def test_all_targets_die_and_one_comes_back(member_folder, start_target):
    first = [start_target(0, pace=0.005), start_target(1, pace=0.005)]
    with connect(member_folder, queue_depth=20) as client:
        stream = client.stream(iter(make_requests(100)))
        seen = [next(stream).request.index for _ in range(30)]
        for target in first:
            target.kill()
        rest = []
        reader = threading.Thread(target=lambda: rest.extend(indexes(stream)))
        reader.start()
        deadline = time.monotonic() + 5.0
        while not client.stats().status.startswith("waiting for targets") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.stats().status.startswith("waiting for targets (target-")
        start_target(1)
        began = time.monotonic()
        reader.join(20)
        assert time.monotonic() - began < 5.0
        assert client.stats().status == "streaming"
    assert seen + rest == list(range(100))


def test_no_target_for_too_long_is_a_temporary_error(member_folder, start_target):
    timeouts = dataclasses.replace(QUICK, no_target=1.0)
    with connect(member_folder, timeouts=timeouts) as client:
        began = time.monotonic()
        with pytest.raises(
            TemporaryError, match=r"no target has been there for 1 s .*start targets"
        ) as raised:
            next(client.stream(iter(make_requests(3))))
        assert raised.value.exit_code == 75
        assert 0.9 < time.monotonic() - began < 3.0


def test_a_target_that_joins_is_used_within_five_seconds(member_folder, start_target):
    start_target(0, pace=0.004, token_budget=64)
    with connect(member_folder, queue_depth=20) as client:
        stream = client.stream(iter(make_requests(100_000)))
        next(stream)
        start_target(1, pace=0.004, token_budget=64)
        began = time.monotonic()
        for reply in stream:
            check(reply)
            if any(t.name == "target-1" and t.delivered > 5 for t in client.stats().targets):
                break
            assert time.monotonic() - began < 5.0
        stream.close()


def test_twenty_random_kills_lose_nothing_and_repeat_nothing(member_folder, start_target):
    chance = random.Random(7)
    alive = {index: start_target(index, pace=0.001, token_budget=100) for index in range(3)}
    kills = 0
    with connect(member_folder, queue_depth=24) as client:
        seen = []
        for reply in client.stream(iter(make_requests(1500))):
            check(reply)
            seen.append(reply.request.index)
            if len(seen) % 70 == 0 and kills < 20:
                index = chance.choice(sorted(alive))
                alive[index].kill()
                alive[index] = start_target(index, pace=0.001, token_budget=100, wait=False)
                kills += 1
        stats = client.stats()
    print(f"requested {stats.requested}, re-issued {stats.reissued}, delivered {stats.delivered}")
    assert kills == 20
    assert seen == list(range(1500))
    assert stats.requested == stats.delivered == 1500


# Targets that hang


def test_a_stopped_target_is_found_out_by_its_silence(member_folder, start_target):
    start_target(0, "stop mid-compute", token_budget=100, pace=0.002)
    start_target(1, token_budget=100, pace=0.002)
    with connect(member_folder, queue_depth=30) as client:
        seen, gap = longest_gap(client.stream(iter(make_requests(200))))
        stats = client.stats()
    assert seen == list(range(200))
    assert gap < QUICK.silence + 2.0
    assert any("silent" in cause for cause in stats.causes)


def test_a_target_that_answers_pings_but_no_requests_runs_into_the_deadline(member_folder, start_target):
    timeouts = dataclasses.replace(QUICK, request=1.0)
    start_target(0, pace=30.0)
    start_target(1)
    with connect(member_folder, queue_depth=8, timeouts=timeouts) as client:
        seen, gap = longest_gap(client.stream(iter(make_requests(60))))
        causes = client.stats().causes
    assert seen == list(range(60))
    assert gap < 3.0
    assert any("not answered" in cause for cause in causes)


def test_a_target_that_goes_on_after_a_stop_is_used_again(member_folder, start_target):
    stopped = start_target(0, pace=0.002, token_budget=64)
    with connect(member_folder, queue_depth=20) as client:
        stream = client.stream(iter(make_requests(200)))
        seen = [next(stream).request.index for _ in range(20)]
        stopped.send(signal.SIGSTOP)
        threading.Timer(2.0, lambda: stopped.send(signal.SIGCONT)).start()
        seen += [reply.request.index for reply in stream]
    assert seen == list(range(200))


def test_a_stopped_drafter_does_not_hold_up_the_others(member_folder, start_target):
    target = start_target(0, silence_timeout=1.0)
    stuck = start_drafter(member_folder, index=1, signal_at=(20, signal.SIGSTOP))
    try:
        with connect(member_folder) as client:
            seen, gap = longest_gap(paced(client.stream(iter(make_requests(300))), 0.01))
        assert seen == list(range(300))
        assert gap < 1.0
    finally:
        stuck.kill()
        stuck.join()
    assert any("nothing heard" in cause for cause in target.finish()["causes"])


# A network that is cut


@pytest.fixture
def other_network():
    """A network namespace of its own, joined to this one by a pair of interfaces; both addresses."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for a network namespace")
    name = f"dflash-{os.getpid()}"
    near, far = f"dfn{os.getpid()}", f"dff{os.getpid()}"
    subnet = f"10.213.{os.getpid() % 250}"

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        ip("link", "set", far, "netns", name)
        ip("addr", "add", f"{subnet}.1/24", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "addr", "add", f"{subnet}.2/24", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"{subnet}.2", lambda state: ip("-n", name, "link", "set", far, state)
    finally:
        ip("netns", "del", name)


def test_a_network_cut_in_half_is_silence_and_heals(member_folder, start_target, other_network):
    namespace, address, set_link = other_network
    start_target(0, namespace=namespace, bind=address, pace=0.002, token_budget=100)
    start_target(1, pace=0.002, token_budget=100)
    with connect(member_folder, queue_depth=30) as client:
        stream = client.stream(iter(make_requests(100_000)))
        head = [next(stream).request.index for _ in range(100)]
        assert {target.name for target in client.stats().targets if target.delivered} == {
            "target-0",
            "target-1",
        }
        set_link("down")
        lost = read_until(stream, lambda: client.stats().links_lost == 1, seconds=10.0)
        assert any("silent" in cause or "lost" in cause for cause in client.stats().causes)
        set_link("up")

        def is_back():
            return any(t.name == "target-0" and t.delivered > 5 for t in client.stats().targets)

        healed = read_until(stream, is_back, seconds=20.0)
        assert head + lost + healed == list(range(len(head + lost + healed)))


# Replies that are wrong


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("corrupt", "checksum"),
        ("truncate", "shorter than announced"),
        ("nan", "tap 1 is not finite"),
        ("inf", "tap 3 is not finite"),
        ("zeros", "tap 3 is all zero"),
        ("constant", "the final state is constant"),
        ("wrong length", "were announced"),
        ("not asked for", "was not asked for"),
        ("garbage", "bad control message"),
        ("cut off", "bad control message"),
    ],
)
def test_bad_replies_are_fetched_elsewhere_and_end_the_link(member_folder, start_target, fault, cause):
    start_target(0, fault, checksum_every=1, token_budget=64)
    start_target(1, token_budget=64)
    with connect(member_folder, queue_depth=20) as client:
        assert indexes(client.stream(iter(make_requests(120, longest=20)))) == list(range(120))
        stats = client.stats()
    assert any(cause in text for text in stats.causes), stats.causes
    assert stats.links_lost >= 1
    assert stats.reissued > 0


def test_a_transfer_that_is_announced_and_does_not_come_is_fetched_elsewhere(member_folder, start_target):
    timeouts = dataclasses.replace(QUICK, transfer=1.0)
    start_target(0, "delay", token_budget=64)
    start_target(1, token_budget=64)
    with connect(member_folder, queue_depth=20, timeouts=timeouts) as client:
        seen, gap = longest_gap(client.stream(iter(make_requests(150, longest=20))))
        stats = client.stats()
    assert seen == list(range(150))
    assert gap < 1.0 + 2.0
    assert any("tensors:" in cause for cause in stats.causes), stats.causes
    assert stats.reissued > 0


def test_a_sample_that_is_bad_everywhere_is_named(member_folder, start_target):
    start_target(0, "nan")
    with connect(member_folder) as client:
        began = time.monotonic()
        replies = list(client.stream(iter(make_requests(5))))
        for reply in replies:
            assert reply.states is None
            assert re.search(r"sample 'sample-\d+' was refused .* tap 1 is not finite", reply.fault)
        assert time.monotonic() - began < 5.0


def test_when_no_sample_can_be_had_any_more_the_stream_says_so(member_folder, start_target):
    start_target(0, "nan")
    with connect(member_folder) as client:
        stream = client.stream(iter(make_requests(60)))
        with pytest.raises(DflashError, match=r"16 samples in a row could not be had: sample 'sample-\d+'"):
            list(stream)


def test_what_fails_in_the_target_is_told_in_the_drafter(member_folder, start_target):
    start_target(0, "out of memory")
    with connect(member_folder) as client:
        began = time.monotonic()
        (reply,) = client.stream(iter(make_requests(1)))
        assert re.search(r"sample 'sample-\d+' was refused 3 times.*out of memory", reply.fault)
        assert time.monotonic() - began < 5.0


def test_only_the_sample_that_spoils_its_batch_is_refused(member_folder, start_target):
    start_target(0, "bad ids", token_budget=1000)
    requests = make_requests(40)
    for request in requests:
        request.ids[0] = 1
    requests[17].ids[0] = 7
    with connect(member_folder) as client:
        replies = list(client.stream(iter(requests)))
        assert [reply.request.index for reply in replies if reply.states is None] == [17]
        assert re.search(r"sample 'sample-17' was refused .*outside the vocabulary", replies[17].fault)
        assert client.stats().refusals == 3


def test_a_target_on_which_everything_fails_ends_itself(member_folder, start_target):
    broken = start_target(0, "out of memory")
    start_target(1)
    with connect(member_folder) as client:
        assert indexes(client.stream(iter(make_requests(100)))) == list(range(100))
    broken.process.join(10)
    assert broken.process.exitcode == 1


# Who may join


def test_another_models_target_is_refused_and_named(member_folder, start_target):
    start_target(0, identity={"fingerprint": "another-model"})
    timeouts = dataclasses.replace(QUICK, no_target=2.0)
    with (
        connect(member_folder, timeouts=timeouts) as client,
        pytest.raises(TemporaryError, match=r"fingerprint differs: the target has another-model"),
    ):
        next(client.stream(iter(make_requests(3))))


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        ({"taps": (1, 2)}, "taps differs"),
        ({"dtype": "float32"}, "dtype differs"),
        ({"final": False}, "final differs"),
        ({"hidden_size": 16}, "hidden_size differs"),
    ],
)
def test_targets_that_serve_something_else_are_passed_over(member_folder, start_target, identity, text):
    start_target(0, identity=identity)
    start_target(1)
    with connect(member_folder) as client:
        assert indexes(client.stream(iter(make_requests(50)))) == list(range(50))
        deadline = time.monotonic() + 5.0
        while not (causes := client.stats().causes) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert any(text in cause for cause in causes)


def test_a_drafter_without_a_published_key_is_not_let_in(member_folder, start_target):
    target = start_target(0)
    timeouts = dataclasses.replace(QUICK, hello=1.0, no_target=2.0)
    with (
        connect(member_folder, keys=KeyPair.generate(), timeouts=timeouts) as client,
        pytest.raises(TemporaryError, match=r"no target has been there .*key"),
    ):
        next(client.stream(iter(make_requests(3))))
    assert target.finish()["samples"] == 0


def test_a_target_that_does_not_hold_the_key_it_published_is_not_used(member_folder, start_target):
    target = start_target(0, "publishes a wrong key")
    timeouts = dataclasses.replace(QUICK, hello=1.0, no_target=2.0)
    with (
        connect(member_folder, timeouts=timeouts) as client,
        pytest.raises(TemporaryError, match=r"no target has been there"),
    ):
        next(client.stream(iter(make_requests(3))))
    assert target.finish()["samples"] == 0


def test_another_runs_drafter_is_refused(member_folder, start_target):
    start_target(0)
    timeouts = dataclasses.replace(QUICK, no_target=1.0)
    with (
        connect(member_folder, run="run-2", timeouts=timeouts) as client,
        pytest.raises(TemporaryError, match=r"serves run run-1, not run-2"),
    ):
        next(client.stream(iter(make_requests(3))))


def send_to_target(folder, keys, frames):
    """What an admitted process that speaks nonsense gets as answers, until there are none for a second."""
    (member,) = [member for member in folder.members() if member.role == "target"]
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.curve_publickey, peer.curve_secretkey = keys.public.encode(), keys.secret.encode()
    peer.curve_serverkey = member.public_key.encode()
    peer.connect(f"tcp://127.0.0.1:{member.control_port}")
    peer.send_multipart(frames)
    answers = []
    while peer.poll(1000):
        answers.append(peer.recv())
    peer.close()
    context.term()
    return answers


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"nonsense"], b"bad control message"),
        ([b'{"kind": "ask", "items": []}'], b"bad control message"),
        ([b'{"kind": "ping"}'], b"no such link"),
        ([b"1", b"2", b"3"], b"3 frames"),
    ],
)
def test_nonsense_on_the_control_connection_is_answered_and_harms_nobody(
    member_folder, start_target, frames, text
):
    target = start_target(0)
    (answer,) = send_to_target(member_folder, member_folder.admit(9), frames)
    assert text in answer
    with connect(member_folder) as client:
        assert indexes(client.stream(iter(make_requests(20)))) == list(range(20))
    assert target.finish()["samples"] == 20


# Attempts


def test_a_higher_attempt_takes_over_and_a_lower_one_is_turned_away(member_folder, start_target):
    target = start_target(0, pace=0.01)
    old_keys, new_keys = KeyPair.generate(), KeyPair.generate()
    member = dataclasses.replace(member_folder.members()[0], role="drafter", host="", control_port=0)
    member_folder.publish(dataclasses.replace(member, index=1, public_key=old_keys.public))
    member_folder.publish(dataclasses.replace(member, index=2, public_key=new_keys.public))
    with connect(member_folder, attempt=1, keys=old_keys) as old:
        old_stream = old.stream(iter(make_requests(100_000)))
        next(old_stream)
        with connect(member_folder, attempt=2, keys=new_keys) as new:
            assert indexes(new.stream(iter(make_requests(20)))) == list(range(20))
            with pytest.raises(TemporaryError, match="attempt 2 is running; attempt 1 is over"):
                for _ in old_stream:
                    pass
    stats = target.finish()
    assert any("attempt 2 has taken over" in cause for cause in stats["causes"])
    assert stats["links_refused"] >= 1


def test_a_drafter_that_is_killed_leaves_the_target_serving(member_folder, start_target):
    target = start_target(0, silence_timeout=1.0)
    killed = start_drafter(member_folder, index=0, signal_at=(30, signal.SIGKILL))
    killed.join()
    with connect(member_folder, attempt=2) as client:
        assert indexes(client.stream(iter(make_requests(50)))) == list(range(50))
    assert target.finish()["links_dropped"] == 1


# Stopping


def test_a_drafter_that_waits_for_targets_can_be_interrupted(member_folder):
    with connect(member_folder) as client:
        threading.Timer(0.3, client.interrupt).start()
        with pytest.raises(Preempted):
            next(client.stream(iter(make_requests(3))))


def test_a_target_that_is_asked_to_stop_says_goodbye(member_folder, start_target):
    leaving = start_target(0, pace=0.003, token_budget=64)
    start_target(1, pace=0.003, token_budget=64)
    with connect(member_folder, queue_depth=20) as client:
        stream = client.stream(iter(make_requests(200)))
        seen = [next(stream).request.index for _ in range(20)]
        leaving.finish()
        rest, gap = longest_gap(stream)
        causes = client.stats().causes
    assert seen + rest == list(range(200))
    assert gap < 2.0
    assert any("the target stops" in cause for cause in causes)
