"""A keep-alive HTTP/1.1 client of one server: JSON in, JSON out, and nothing else.

A worker makes thousands of small requests a second to an engine next to it. A general client spends more
time on each than the rest of the worker does, so this one speaks just what the engine's server speaks:
bodies of known length or in chunks, no redirects, no compression, no cookies, no TLS.
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import orjson

_CONNECT_SECONDS = 10.0


class HttpClient:
    """Connections to `url` (http://host:port), one for each request that is in flight, kept for the next."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is no http:// address")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    async def post(self, path: str, value: Any, timeout: float) -> tuple[int, Any]:
        """Status and parsed body. ConnectionError when it breaks, TimeoutError after `timeout` seconds."""
        return await self._request(
            "POST", path, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), timeout
        )

    async def get(self, path: str, timeout: float) -> tuple[int, Any]:
        """As `post`, without a body."""
        return await self._request("GET", path, b"", timeout)

    async def _request(self, method: str, path: str, body: bytes, timeout: float) -> tuple[int, Any]:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            connection = self._idle.pop() if self._idle else None
            reused = connection is not None
            if connection is None:
                connection = await self._connect(min(timeout, _CONNECT_SECONDS))
            self._busy.add(connection)
            try:
                status, answer = await connection.exchange(head.encode() + body, deadline)
            except _StaleError:
                if reused:
                    continue  # the server had closed an idle connection: nothing was asked yet
                raise
            finally:
                self._busy.discard(connection)
                if not self._closed and connection.usable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return status, _parsed(answer)

    async def _connect(self, timeout: float) -> "_Connection":
        try:
            async with asyncio.timeout(timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port
                )
        except TimeoutError:  # not the request's own time: nothing was asked yet
            raise ConnectionError(f"{self.url} does not accept connections") from None
        return connection

    def abandon(self) -> None:
        """Break off every request in flight with a ConnectionError."""
        for connection in list(self._busy):
            connection.close()

    def close(self) -> None:
        """Close idle connections; those in use close when their requests end."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _StaleError(ConnectionError):
    """The server closed the connection before it sent a byte."""


class _Connection(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = bytearray()
        self._length = -1
        """Bytes of head and body together, once the head is there; -1 before; -2 for chunks."""
        self._head = 0
        self._keep = True
        self.usable = False
        self._deadline = 0.0
        """Of the request that is in flight; loop time."""
        self._timer: asyncio.TimerHandle | None = None
        """Outlives requests that are answered in time, which is nearly all: one a request would cost more."""

    async def exchange(self, request: bytes, deadline: float) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        self.usable = False
        if self._transport is None or self._transport.is_closing():
            raise _StaleError("the server closed the connection")
        self._answer = loop.create_future()
        self._transport.write(request)
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            self._set_timer(loop)
        try:
            answer = await self._answer
            self.usable = self._keep
            return answer
        finally:
            self._answer = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stop_timer()
        self._timer = loop.call_at(self._deadline, self._expire, loop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._answer is None:
            return  # idle: the next request sets another
        if loop.time() < self._deadline:
            self._set_timer(loop)  # it was an earlier request's
        else:
            self._fail(TimeoutError("no answer in time"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._stop_timer()
        if self._received:
            self._fail(ConnectionError(f"the server broke off in the middle of an answer ({exc})"))
        else:
            self._fail(_StaleError(f"the server closed the connection ({exc})"))

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        try:
            if self._length == -1 and not self._read_head():
                return
            if self._length >= 0:
                if len(received) < self._length:
                    return
                body = bytes(received[self._head : self._length])
            else:
                joined = _dechunked(received, self._head)
                if joined is None:
                    return
                body = joined
            status = int(received[9:12])
        except ValueError as error:
            self._fail(ConnectionError(f"the server does not speak HTTP/1.1 as expected: {error}"))
            self.close()
            return
        received.clear()
        self._length = -1
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._head = end + 4
        head = bytes(self._received[: self._head]).lower()
        self._keep = b"\r\nconnection: close\r\n" not in head
        place = head.find(b"\r\ncontent-length:")
        if place >= 0:
            self._length = self._head + int(head[place + 17 : head.index(b"\r\n", place + 2)])
        elif b"\r\ntransfer-encoding: chunked\r\n" in head:
            self._length = -2
        else:
            raise ValueError("an answer has neither a length nor chunks")
        return True


def _dechunked(received: bytearray, start: int) -> bytes | None:
    """The body from its chunks; None while some are missing."""
    parts: list[bytes] = []
    while True:
        line = received.find(b"\r\n", start)
        if line < 0:
            return None
        size = int(received[start:line].split(b";", 1)[0], 16)
        following = line + 2 + size + 2
        if len(received) < following:
            return None
        if size == 0:
            return b"".join(parts)
        parts.append(bytes(received[line + 2 : line + 2 + size]))
        start = following


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
