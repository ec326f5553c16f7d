"""A fake for faults: an HTTP proxy in front of a real S3 server that breaks chosen requests.

It passes requests on unchanged, with the `Host` the client signed, so everything it does not break is
the real server's answer. It is not an S3 server and checks nothing.
"""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Exchange:
    """One request and what the real server said to it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytes = b""
    answer_headers: list[tuple[str, str]] = field(default_factory=list)


Fault = Callable[["Exchange", Callable[[], None]], bytes | tuple[int, bytes] | None]
"""Called with a request and a function that passes it on (and fills in the answer).

Gives None to pass the request on and its answer back, `b""` to break the connection without an answer,
or (status, body) to answer in the server's place. It may pass the request on and change the answer.
"""


class FaultyProxy:
    """The proxy; `fault` decides about each request, `seen` keeps all of them."""

    def __init__(self, upstream: str) -> None:
        self.fault: Fault = lambda exchange, forward: None
        self.seen: list[Exchange] = []
        self._upstream = urlsplit(upstream).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _serve(self) -> None:
                if self.headers.get("Expect", "").lower() == "100-continue":
                    pass  # BaseHTTPRequestHandler has answered it
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                exchange = Exchange(self.command, self.path, dict(self.headers.items()), body)
                proxy.seen.append(exchange)
                decided = proxy.fault(exchange, lambda: proxy._forward(exchange))
                if decided == b"":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if isinstance(decided, tuple):
                    exchange.status, exchange.answer = decided
                    exchange.answer_headers = [("Content-Type", "application/xml")]
                elif not exchange.status:
                    proxy._forward(exchange)
                self.send_response(exchange.status)
                for name, value in exchange.answer_headers:
                    self.send_header(name, value)
                length = dict(exchange.answer_headers).get("X-Claimed-Length", str(len(exchange.answer)))
                if self.command == "HEAD":
                    length = dict(exchange.answer_headers).get("X-Head-Length", "0")
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(exchange.answer)
                if length != str(len(exchange.answer)) and self.command != "HEAD":
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def count(self, method: str, in_path: str = "") -> int:
        """How many requests of this method came."""
        return sum(one.method == method and in_path in one.path for one in self.seen)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _forward(self, exchange: Exchange) -> None:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            connection.putrequest(exchange.method, exchange.path, skip_host=True, skip_accept_encoding=True)
            for name, value in exchange.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(exchange.body or None)
            response = connection.getresponse()
            exchange.status, exchange.answer = response.status, response.read()
            skipped = ("connection", "content-length", "transfer-encoding", "date", "server")
            exchange.answer_headers = [(n, v) for n, v in response.getheaders() if n.lower() not in skipped]
            if exchange.method == "HEAD":
                exchange.answer_headers.append(("X-Head-Length", response.headers.get("Content-Length", "0")))
        finally:
            connection.close()


def s3_error(status: int, code: str, message: str = "a fault made by a test") -> tuple[int, bytes]:
    """An answer like an S3 server's."""
    return status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy in front of `upstream` for the length of a block."""
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
