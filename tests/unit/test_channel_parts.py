"""The channel's pure parts: messages, layout of a buffer, checks on receipt, packing, keys, buffers."""

import gc
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.channel import messages
from dflash.channel.buffers import BufferPool
from dflash.channel.interface import Identity, Member
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.members import at_addresses
from dflash.channel.packing import pick
from dflash.channel.shares import RecentShare
from dflash.channel.verify import find_faults
from dflash.channel.wire import (
    checksum,
    describe_mismatch,
    flat_bytes,
    gathered_bytes,
    pack,
    slots,
    transfer_sizes,
    unpack,
)
from dflash.model.states import States

IDENTITY = Identity(fingerprint="f", taps=(1, 4, 7), hidden_size=8, dtype="bfloat16", final=True)


def random_states(length, identity=IDENTITY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if identity.dtype == "bfloat16" else torch.float32
    taps = torch.randn(length, identity.hidden_size * len(identity.taps), generator=generator).to(dtype)
    final = torch.randn(length, identity.hidden_size, generator=generator).to(dtype)
    return States(taps, final if identity.final else None)


# Messages


@settings(deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_garbage_is_a_message_error_and_nothing_else(frame):
    for decode in (messages.decode_from_drafter, messages.decode_from_target):
        with pytest.raises(messages.MessageError):
            decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b'{"kind": "ask", "items": []}',
        b'{"kind": "ask", "items": [{"index": -1, "sample_id": "s", "length": 4}]}',
        b'{"kind": "ask", "items": [{"index": 0, "sample_id": "s", "length": 0}]}',
        b'{"kind": "ask", "items": [{"index": 0, "sample_id": "s", "length": "4"}]}',
        b'{"kind": "ping", "more": 1}',
        b'{"kind": "welcome", "host": "h", "store_port": 70000, "group": "g", "token_budget": 1}',
        b'{"kind": "pong", "idle_share": NaN}',
        b'{"kind": "ping"}' + b" " * messages.MAX_HEADER_BYTES,
    ],
)
def test_messages_out_of_bounds_are_refused(frame):
    with pytest.raises(messages.MessageError):
        messages.decode_from_drafter(frame)
    with pytest.raises(messages.MessageError):
        messages.decode_from_target(frame)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), min_size=1, max_size=10))
def test_ids_survive_the_journey(samples):
    ids = [np.array(sample, dtype=np.int32) for sample in samples]
    items = [messages.Item(index=i, sample_id=f"s{i}", length=len(s)) for i, s in enumerate(ids)]
    ask = messages.decode_from_drafter(messages.encode(messages.Ask(items=items)))
    assert isinstance(ask, messages.Ask)
    for sent, received in zip(ids, messages.decode_ids(ask, messages.encode_ids(ids)), strict=True):
        assert np.array_equal(sent, received)


def test_ids_that_are_not_as_many_as_announced_are_refused():
    ask = messages.Ask(items=[messages.Item(index=0, sample_id="s", length=3)])
    with pytest.raises(messages.MessageError, match="3 token ids were announced and 8 bytes came"):
        messages.decode_ids(ask, b"12345678")


# The buffer's layout


def packed(states, identity, number, *, direct=False):
    """The transfers of a batch, as a sender makes them."""
    lengths = [len(sample.taps) for sample in states]
    buffer = torch.empty(gathered_bytes(lengths, identity, direct) + 100, dtype=torch.uint8)
    return pack(states, identity, number, buffer, direct=direct)


def carried(transfers, lengths, identity, *, direct=False):
    """A receive buffer that was used before, after these transfers."""
    flat = torch.full((flat_bytes(sum(lengths), identity),), 1, dtype=torch.uint8)
    for sent, slot in zip(transfers, slots(flat, lengths, identity, direct), strict=True):
        slot[: len(sent)] = sent
    return flat


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("large", [0, 1, 2])
def test_states_survive_the_journey(dtype, final, large):
    """`large`: which sample's taps, or final state too, are too large to be gathered."""
    identity = Identity("f", (0, 2), 64, dtype, final)
    lengths = [1, 5, 3]
    lengths[large] = 5000 if large else 1
    sent = [random_states(length, identity, seed=length) for length in lengths]
    transfers = packed(sent, identity, 12, direct=True)
    assert [len(part) for part in transfers] == transfer_sizes(lengths, identity, direct=True)
    assert (len(transfers) > 1) == bool(large)
    received = unpack(carried(transfers, lengths, identity, direct=True), lengths, identity, 12)
    for a, b in zip(sent, received, strict=True):
        assert torch.equal(a.taps, b.taps)
        assert (a.final is None and b.final is None) or torch.equal(a.final, b.final)


def test_large_states_are_sent_from_where_they_lie():
    identity = Identity("f", (0, 2), 64, "float32", False)
    sample = random_states(5000, identity)
    first, trailer = packed([sample], identity, 0, direct=True)
    assert first.data_ptr() == sample.taps.data_ptr()
    assert len(trailer) == 8
    assert len(packed([sample], identity, 0)) == 1  # gathered where that is asked for


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_both_ends_cut_alike_and_lose_nothing(lengths, final, direct):
    identity = Identity("f", (0, 2, 5), 96, "bfloat16", final)
    sizes = transfer_sizes(lengths, identity, direct)
    assert sum(sizes) == flat_bytes(sum(lengths), identity)
    assert gathered_bytes(lengths, identity, direct) <= sum(sizes)
    assert direct or len(sizes) == 1


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_short_transfer_is_noticed_whichever_it_is(short):
    identity = Identity("f", (0, 2), 64, "bfloat16", False)
    lengths = [5000, 3, 4500]
    transfers = packed([random_states(n, identity) for n in lengths], identity, 3, direct=True)
    assert len(transfers) == 4
    transfers[short] = transfers[short][:-64]
    states = unpack(carried(transfers, lengths, identity, direct=True), lengths, identity, 3)
    for numbers in (None, torch.cat([sample.taps.view(-1) for sample in states])):
        faults = find_faults(states, identity, numbers)
        assert [bool(fault) for fault in faults] == [index == short for index in range(3)]


def test_a_buffer_of_another_batch_is_not_opened():
    (flat,) = packed([random_states(4)], IDENTITY, 5)
    assert unpack(flat, [4], IDENTITY, 6) is None


@given(st.integers(0, 4 * 32 * 2 - 1), st.integers(0, 7))
def test_the_checksum_notices_any_flipped_bit(byte, bit):
    (flat,) = packed([random_states(4)], IDENTITY, 0)
    before = checksum([flat])
    assert checksum([flat[:100], flat[100:]]) == before  # however it is cut
    flat[byte] ^= 1 << bit
    assert checksum([flat]) != before


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (States(torch.zeros(4, 24).bfloat16(), None), "the final state is missing"),
        (States(torch.zeros(3, 24).bfloat16(), torch.zeros(3, 8).bfloat16()), r"taps has shape \(3, 24\)"),
        (States(torch.zeros(4, 24), torch.zeros(4, 8)), "taps is torch.float32"),
        (States(torch.zeros(4, 24).bfloat16(), torch.zeros(4, 9).bfloat16()), r"final has shape \(4, 9\)"),
    ],
)
def test_a_capture_that_returns_something_else_is_noticed(states, text):
    assert describe_mismatch(random_states(4), 4, IDENTITY) is None
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(describe_mismatch(states, 4, IDENTITY))


# Checks on receipt


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@given(
    length=st.integers(1, 6),
    tap=st.integers(0, 3),
    fault=st.sampled_from(["nan", "inf", "-inf", "zero", "-0", "constant"]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_every_fault_is_found_wherever_it_is_and_only_there(dtype, length, tap, fault, data):
    identity = Identity("f", (1, 4, 7), 8, dtype, True)
    batch = [random_states(length, identity, seed) for seed in range(3)]
    assert find_faults(batch, identity) == [None, None, None]
    states = batch[1]
    part = states.final if tap == 3 else states.taps[:, 8 * tap : 8 * tap + 8]
    if fault in ("nan", "inf", "-inf"):
        row, column = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7))
        part[row, column] = float(fault)
        expected = "is not finite"
    else:
        part[:] = {"zero": 0.0, "-0": -0.0, "constant": 0.25}[fault]
        expected = "is constant" if fault == "constant" else "is all zero"
    where = "the final state" if tap == 3 else f"tap {identity.taps[tap]}"
    assert find_faults(batch, identity) == [None, f"{where} {expected}", None]


def test_one_constant_token_is_no_fault():
    states = random_states(5)
    states.taps[-1] = 0.0
    states.taps[0, :8] = 2.0
    assert find_faults([states], IDENTITY) == [None]


# Packing


@dataclass(frozen=True)
class Waiting:
    arrival: int
    tokens: int


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=30),
    st.integers(1, 100),
)
def test_batches_take_the_oldest_first_and_keep_to_the_budget(requests, budget):
    queues = {link: deque() for link in range(4)}
    for arrival, (link, tokens) in enumerate(requests):
        queues[link].append(Waiting(arrival, tokens))
    taken = []
    while batch := pick(queues, budget):
        arrivals = [request.arrival for _, request in batch]
        assert arrivals == sorted(arrivals)
        assert sum(request.tokens for _, request in batch) <= budget or len(batch) == 1
        taken += arrivals
    assert taken == list(range(len(requests)))


# Keys


def test_only_published_keys_come_in_and_strangers_cannot_hammer_the_store():
    known, stranger = KeyPair.generate(), KeyPair.generate()
    published, looks, now = [], [], [0.0]

    def fetch():
        looks.append(now[0])
        return list(published)

    authority = Authority(fetch, clock=lambda: now[0])
    assert not authority.callback("global", known.public.encode())
    published.append(known.public)
    now[0] = 1.0
    assert authority.callback("global", known.public.encode())
    for step in range(1000):
        now[0] = 1.0 + step / 1000
        assert not authority.callback("global", stranger.public.encode())
        assert authority.callback("global", known.public.encode())
    assert len(looks) <= 5
    assert authority.refused == 1001


def test_an_outage_of_the_store_keeps_known_keys_in():
    known = KeyPair.generate()
    answers = [[known.public], OSError("away")]

    def fetch():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    now = [0.0]
    authority = Authority(fetch, clock=lambda: now[0])
    assert authority.callback("global", known.public.encode())
    now[0] = 5.0
    assert not authority.callback("global", KeyPair.generate().public.encode())
    assert authority.callback("global", known.public.encode())


# Discovery


def test_only_targets_at_the_named_addresses_are_used():
    here = Member("target", 0, "a", "127.0.0.1", 1, "k", 0, "f")
    elsewhere = Member("target", 1, "b", "192.0.2.7", 1, "k", 0, "f")
    assert at_addresses(lambda: [here, elsewhere], ["localhost"])() == [here]
    assert at_addresses(lambda: [here, elsewhere], ["192.0.2.7", "127.0.0.1"])() == [here, elsewhere]
    assert at_addresses(lambda: [here], ["no-such-name.invalid"])() == []


# Buffers


def test_a_buffer_comes_back_only_when_the_last_view_is_gone():
    pool = BufferPool(torch.device("cpu"))
    first = pool.take(1000)
    address = first.data_ptr()
    view = first[10:20].view(torch.int16)
    del first
    gc.collect()
    second = pool.take(1000)
    assert second.data_ptr() != address
    del view
    gc.collect()
    assert pool.take(900).data_ptr() == address


def test_few_free_buffers_are_kept_and_none_is_wasted_on_a_small_one():
    pool = BufferPool(torch.device("cpu"))
    lent = [pool.take(8 << 20) for _ in range(10)]
    del lent
    gc.collect()
    assert len(pool._free) == 4
    small = pool.take(10)
    assert len(pool._free) == 4
    large = pool.take(7 << 20)
    assert len(pool._free) == 3
    assert (len(small), len(large)) == (10, 7 << 20)


# Shares of time


def test_a_share_of_the_last_half_minute():
    share = RecentShare(now=100.0)
    assert share.share(100.0) == 0.0
    share.add(100.0, 105.0)
    assert share.share(110.0) == pytest.approx(0.5)
    share.add(110.0, 125.0)
    assert share.share(130.0) == pytest.approx(20 / 30)
    assert share.share(145.0) == pytest.approx(0.5)
    assert share.share(200.0) == 0.0
