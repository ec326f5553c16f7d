"""The lean HTTP client: answers in any split, broken connections, late answers; and the pace of asking."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.engines.http import HttpClient, _Connection
from dflash.engines.pacing import Pace

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(serve: Serve, body: Callable[[HttpClient], Awaitable[None]]) -> None:
    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            await body(client)
        finally:
            client.close()
            server.close()

    asyncio.run(run())


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


def answer(body: bytes, *headers: bytes) -> bytes:
    return (
        b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers]) + b"\r\n\r\n" + body
    )


PLAIN = answer(b'{"output_ids":[1,2,3]}')
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'8\r\n{"output\r\nE;x=1\r\n_ids":[1,2,3]}\r\n0\r\n\r\n'
)


@pytest.mark.parametrize("whole", [PLAIN, CHUNKED])
@given(cuts=st.lists(st.integers(1, 120), max_size=6))
@settings(max_examples=60, deadline=None)
def test_an_answer_is_read_however_the_network_cuts_it(whole: bytes, cuts: list[int]) -> None:
    async def run() -> None:
        connection = _Connection()
        future = asyncio.get_running_loop().create_future()
        connection._answer = future
        edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
        for start, end in itertools.pairwise(edges):
            connection.data_received(whole[start:end])
        assert await future == (200, b'{"output_ids":[1,2,3]}')
        assert not connection._received

    asyncio.run(run())


def test_one_connection_serves_many_requests() -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while True:
            writer.write(answer(await request_of(reader)))

    async def body(client: HttpClient) -> None:
        for number in range(20):
            assert await client.post("/generate", {"n": number}, 5.0) == (200, {"n": number})
        assert len(connections) == 1

    with_server(serve, body)


def test_an_idle_connection_that_the_server_closed_is_replaced_unseen() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await request_of(reader)))
        await writer.drain()
        writer.close()

    async def body(client: HttpClient) -> None:
        for number in range(5):
            assert (await client.post("/", number, 5.0))[1] == number
            await asyncio.sleep(0.01)

    with_server(serve, body)


def test_a_broken_answer_is_a_connection_error_and_not_half_an_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(PLAIN[:-5])
        await writer.drain()
        writer.close()

    async def body(client: HttpClient) -> None:
        with pytest.raises(ConnectionError, match="in the middle"):
            await client.post("/generate", {}, 5.0)

    with_server(serve, body)


def test_a_late_answer_never_reaches_the_next_request() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            value = await request_of(reader)
            await asyncio.sleep(0.2 if value == b'"slow"' else 0)
            writer.write(answer(value))

    async def body(client: HttpClient) -> None:
        with pytest.raises(TimeoutError):
            await client.post("/", "slow", 0.05)
        assert await client.post("/", "next", 5.0) == (200, "next")
        await asyncio.sleep(0.3)
        assert await client.post("/", "last", 5.0) == (200, "last")

    with_server(serve, body)


@pytest.mark.parametrize(("earlier", "own"), [(30.0, 0.1), (0.15, 0.4)])
def test_every_request_of_a_connection_has_its_own_deadline(earlier: float, own: float) -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while (value := await request_of(reader)) != b'"never"':
            writer.write(answer(value))
        await reader.read()

    async def body(client: HttpClient) -> None:
        assert await client.post("/", "at once", earlier) == (200, "at once")
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await client.post("/", "never", own)
        assert own - 0.01 <= time.monotonic() - began < own + 5
        assert len(connections) == 1

    with_server(serve, body)


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async def run() -> None:
        with pytest.raises(ConnectionError):
            await HttpClient("http://127.0.0.1:9").get("/", 2.0)

    asyncio.run(run())


def test_the_pace_grows_while_nothing_waits_and_falls_with_the_queue_and_with_refusals() -> None:
    pace = Pace(first=32, most=256)
    for _ in range(20):
        pace.queue_seen(0, pace.now)
    assert pace.now == 256
    pace.queue_seen(100, 256)
    assert pace.now == 256  # once: answers of one length ended together
    pace.queue_seen(100, 256)
    assert pace.now == 204
    pace.queue_seen(20, 204)  # shallow, not empty: just right
    assert pace.now == 204
    for _ in range(50):
        pace.overloaded(now=1.0)  # one storm
    assert 130 < pace.now < 150
    pace.queue_seen(0, 10)  # not even using its pace: no reason to grow
    assert 130 < pace.now < 150
    for second in range(100):
        pace.overloaded(now=2.0 + 2 * second)
    assert pace.now == 1
