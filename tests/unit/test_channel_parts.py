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
from dflash.channel.verify import find_faults, is_finite
from dflash.channel.wire import (
    checksum,
    cut,
    describe_mismatch,
    gathered_bytes,
    is_cut_well,
    is_short,
    pack,
    separate,
    slots,
    stretches,
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


def packed(states, number, *, direct=False):
    """The transfers of a batch, as a sender makes them."""
    batch = stretches(states)
    buffer = torch.empty(gathered_bytes(batch, direct) + 100, dtype=torch.uint8)
    transfers = pack(batch, number, buffer, direct=direct)
    return cut(transfers) if direct else transfers


def carried(transfers, sizes):
    """A receive buffer that was used before, after these transfers; and its parts."""
    flat = torch.full((sum(sizes),), 1, dtype=torch.uint8)
    parts = slots(flat, sizes)
    for sent, slot in zip(transfers, parts, strict=True):
        slot[: len(sent)] = sent
    return flat, parts


def neighbours(lengths, identity, gap=0):
    """Samples as slices of one forward, with `gap` tokens of padding behind each."""
    whole = random_states(sum(lengths) + gap * len(lengths), identity)
    states, start = [], 0
    for length in lengths:
        final = whole.final[start : start + length] if identity.final else None
        states.append(States(whole.taps[start : start + length], final))
        start += length + gap
    return states


SAMPLES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@settings(deadline=None, max_examples=50)
@given(
    lengths=SAMPLES,
    dtype=st.sampled_from(["bfloat16", "float32"]),
    final=st.booleans(),
    direct=st.booleans(),
    gap=st.integers(0, 1),
    width=st.sampled_from([63, 96, 512]),
)
def test_states_survive_the_journey(lengths, dtype, final, direct, gap, width):
    identity = Identity("f", (0, 2), width, dtype, final)
    sent = neighbours(lengths, identity, gap)
    transfers = packed(sent, 12, direct=direct)
    sizes = [len(part) for part in transfers]
    assert is_cut_well(sizes, sum(lengths), identity)
    assert max(sizes) <= (4 << 20) + 8 if direct else len(sizes) == 1
    flat, parts = carried(transfers, sizes)
    assert not any(is_short(part) for part in parts)
    received = separate(unpack(flat, sum(lengths), identity, 12), lengths)
    for a, b in zip(sent, received, strict=True):
        assert torch.equal(a.taps, b.taps)
        assert (a.final is None and b.final is None) or torch.equal(a.final, b.final)


def test_states_of_one_forward_are_sent_from_where_they_lie():
    identity = Identity("f", (0, 2), 64, "bfloat16", True)
    samples = neighbours([1500] * 20, identity)
    transfers = packed(samples, 0, direct=True)
    assert transfers[0].data_ptr() == samples[0].taps.data_ptr()
    assert [len(part) for part in transfers[:2]] == [4 << 20, 30_000 * 256 - (4 << 20)]
    assert transfers[2].data_ptr() == samples[0].final.data_ptr()
    assert len(transfers[2]) == 30_000 * 128
    assert len(transfers) == 4
    assert len(transfers[3]) == 8
    assert len(packed(samples, 0)) == 1  # gathered where that is asked for


def test_small_samples_that_are_no_neighbours_are_gathered():
    identity = Identity("f", (0, 2), 64, "bfloat16", False)
    samples = [random_states(100, identity, seed) for seed in range(20)]
    (transfer,) = packed(samples, 0, direct=True)
    assert len(transfer) == 20 * 100 * 256 + 8


@pytest.mark.parametrize(
    "sizes", [[1024], [1032, 0], [1024, 4, 4], [1, 1031], [2056], [1032, 1032], [0, 0, 1016]]
)
def test_transfers_that_cannot_be_the_batch_are_noticed(sizes):
    identity = Identity("f", (0,), 64, "bfloat16", False)
    assert is_cut_well([512, 512, 8], 8, identity)
    assert is_cut_well([1032], 8, identity)
    assert not is_cut_well(sizes, 8, identity)


@pytest.mark.parametrize("short", [0, 1, 2, 3])
@pytest.mark.parametrize("missing", [8, 64, 100_000])
def test_a_short_transfer_is_noticed_whichever_it_is(short, missing):
    identity = Identity("f", (0, 2), 64, "bfloat16", False)
    samples = [random_states(n, identity, seed=n) for n in (5000, 3, 4500, 30_000)]
    transfers = packed(samples, 3, direct=True)
    sizes = [len(part) for part in transfers]
    assert len(transfers) == 6
    assert min(sizes[:1] + sizes[2:5]) > 100_000
    transfers[short] = transfers[short][: max(0, sizes[short] - missing)]
    _, parts = carried(transfers, sizes)
    for index, part in enumerate(parts[:-1]):
        assert is_finite(part.view(torch.bfloat16)) == (index != short)
        assert is_short(part) == (index == short)


def test_a_buffer_of_another_batch_is_not_opened():
    (flat,) = packed([random_states(4)], 5)
    assert unpack(flat, 4, IDENTITY, 6) is None


@given(st.integers(0, 4 * 32 * 2 - 1), st.integers(0, 7))
def test_the_checksum_notices_any_flipped_bit(byte, bit):
    (flat,) = packed([random_states(4)], 0)
    before = checksum(flat)
    assert checksum(flat[100:], checksum(flat[:100])) == before  # however it is cut
    flat[byte] ^= 1 << bit
    assert checksum(flat) != before


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
    lengths = [3, length, 2]
    batch = random_states(sum(lengths), identity)
    assert find_faults(batch, lengths, identity, finite=True) == [None, None, None]
    states = separate(batch, lengths)[1]
    part = states.final if tap == 3 else states.taps[:, 8 * tap : 8 * tap + 8]
    if fault in ("nan", "inf", "-inf"):
        row, column = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7))
        part[row, column] = float(fault)
        expected = "is not finite"
    else:
        part[:] = {"zero": 0.0, "-0": -0.0, "constant": 0.25}[fault]
        expected = "is constant" if fault == "constant" else "is all zero"
    where = "the final state" if tap == 3 else f"tap {identity.taps[tap]}"
    finite = is_finite(batch.taps) and is_finite(batch.final)
    assert finite == (fault not in ("nan", "inf", "-inf"))
    assert find_faults(batch, lengths, identity, finite=finite) == [None, f"{where} {expected}", None]


def test_one_constant_token_is_no_fault():
    states = random_states(5)
    states.taps[-1] = 0.0
    states.taps[0, :8] = 2.0
    assert find_faults(states, [5], IDENTITY, finite=True) == [None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(data=st.data())
def test_any_bits_are_told_finite_or_not(data, dtype):
    integers, bits = (torch.int16, 15) if dtype is torch.bfloat16 else (torch.int32, 31)
    edges = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, -0.0], dtype=dtype).view(integers)
    pattern = st.one_of(
        st.integers(-(2**bits), 2**bits - 1),
        st.sampled_from([int(edge) + near for edge in edges for near in (-1, 0, 1) if edge > 0 or near >= 0]),
    )
    numbers = torch.tensor(data.draw(st.lists(pattern, min_size=1, max_size=9)), dtype=integers).view(dtype)
    assert is_finite(numbers) == bool(torch.isfinite(numbers).all())


def test_the_last_of_many_numbers_is_looked_at():
    numbers = torch.zeros(1_100_000, dtype=torch.bfloat16)
    assert is_finite(numbers)
    numbers[-1] = -torch.inf
    assert not is_finite(numbers)


def test_a_batch_that_is_not_known_to_be_finite_is_looked_at_sample_by_sample():
    states = random_states(5)
    states.taps[:3] = 3e38
    states.taps[1, 0] = 2e38
    assert find_faults(states, [5], IDENTITY, finite=False) == [None]


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
