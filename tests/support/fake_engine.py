"""A fake of SGLang's HTTP server: for faults and speed, not for truth. It says so wherever it can.

Answers `/generate` at once with ids that follow from the prompt alone, so that a test can tell whether an
answer belongs to its prompt. Faults are told to it in `Behaviour`. Runs in a thread of the test, or as a
process: `python -m tests.support.fake_engine PORT TOKENS [each]`; with `each`, every prompt gets its own.
"""

import asyncio
import random
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import orjson


def fake_answer(prompt_ids: list[int], tokens: int) -> list[int]:
    """`tokens` ids of the tiny tokenizer that follow from the prompt, without loops, and end the turn."""
    generator = random.Random(zlib.crc32(repr(prompt_ids).encode()))
    return [generator.randrange(65, 250) for _ in range(tokens - 1)] + [258]


@dataclass
class Behaviour:
    """What the fake does; changed by a test while it runs."""

    tokens: int = 40
    answer: Callable[[list[int], int], list[int]] = fake_answer
    refuse_share: float = 0.0
    """Share of requests that are answered 503."""
    hang: Callable[[list[int]], bool] = lambda ids: False
    """Prompts that are never answered."""
    stuck: bool = False
    """Healthy on every endpoint, but generates nothing."""
    lie: Callable[[list[int]], bool] = lambda ids: False
    """Answers that hold fewer tokens than they say."""
    too_long: Callable[[list[int]], bool] = lambda ids: False
    """Prompts that are answered 400."""
    delay: float = 0.0
    flowing: bool = False
    """Says that tokens are produced while requests wait for their answers."""
    waiting: int = 0
    """Length of the queue that it reports."""
    unhealthy: bool = False
    """Answers 503 on every endpoint but `/generate`, as a server does that is too busy for its probes."""
    renders: list[int] | None = None
    """Ids that it makes of any conversation."""
    speed: bool = False
    """Answer every request with the same ready-made bytes."""


@dataclass
class FakeSglang:
    """Serves on 127.0.0.1; `requests` counts those for `/generate` by prompt."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    port: int = 0

    def __post_init__(self) -> None:
        self.requests: Counter[tuple[int, ...]] = Counter()
        self.paths: Counter[str] = Counter()
        self.open_now = 0
        self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def __exit__(self, *error: object) -> None:
        def end() -> None:
            if self._server is not None:
                self._server.close()
            self._loop.stop()

        self._loop.call_soon_threadsafe(end)
        self._thread.join(10)

    async def respond(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of one request."""
        self.paths[path] += 1
        b = self.behaviour
        if b.unhealthy and path != "/generate":
            return 503, {"error": {"message": "not healthy"}}
        if path == "/v1/loads":
            used = self.paths[path] if b.flowing else 0
            load = {"num_running_reqs": self.open_now, "num_waiting_reqs": b.waiting, "num_used_tokens": used}
            return 200, {"loads": [load]}
        if path == "/tokenize":
            return (200, {"tokens": b.renders}) if b.renders else (404, {"detail": "not found"})
        if path != "/generate":
            return 200, {"fake": True, "model_path": "fake"}
        request = orjson.loads(body)
        ids = request["input_ids"]
        self.requests[tuple(ids)] += 1
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            if b.too_long(ids):
                return 400, {"error": {"message": "the input is longer than the context"}}
            if random.random() < b.refuse_share:
                return 503, {"error": {"message": "out of memory, try again"}}
            while b.stuck or b.hang(ids):
                await asyncio.sleep(0.05)
            if b.delay:
                await asyncio.sleep(b.delay)
            most = request["sampling_params"]["max_new_tokens"]
            whole = b.answer(ids, b.tokens)
            output = whole[:most]
            said = len(output)
            if b.lie(ids):
                output = output[: said // 2]
            return 200, {
                "text": "",
                "output_ids": output,
                "meta_info": _meta(len(ids), said, cut=said < len(whole)),
            }
        finally:
            self.open_now -= 1


def _meta(prompt: int, completion: int, *, cut: bool = False) -> dict[str, Any]:
    return {
        "id": "fake",
        "finish_reason": {"type": "length", "length": completion}
        if cut
        else {"type": "stop", "matched": 258},
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "e2e_latency": 0.0,
    }


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as much as the engine's client sends."""

    def __init__(self, fake: FakeSglang) -> None:
        self._fake = fake
        self._buffer = b""
        self._ready: dict[int, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            place = head.lower().find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            path = head.split(b" ", 2)[1].decode()
            if self._fake.behaviour.speed and path == "/generate":
                self._transport.write(self._at_once(body))  # type: ignore[attr-defined]
            else:
                task = asyncio.get_running_loop().create_task(self._answer(path, body))
                task.add_done_callback(lambda done: done.exception())

    def _at_once(self, body: bytes) -> bytes:
        """The prompt's and the answer's length must be right; the rest is the same each time."""
        prompt = body.count(b",", 0, body.index(b"]")) + 1
        place = body.index(b'"max_new_tokens":') + len(b'"max_new_tokens":')
        most = int(body[place : place + 8].partition(b",")[0].partition(b"}")[0])
        tokens = min(self._fake.behaviour.tokens, most)
        if tokens not in self._ready:
            self._ready[tokens] = b'{"text":"","output_ids":' + orjson.dumps(fake_answer([0], tokens))
        meta = orjson.dumps(_meta(prompt, tokens))
        return _http(200, self._ready[tokens] + b',"meta_info":' + meta + b"}")

    async def _answer(self, path: str, body: bytes) -> None:
        status, value = await self._fake.respond(path, body)
        self._transport.write(_http(status, orjson.dumps(value)))  # type: ignore[attr-defined]


def _http(status: int, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 %d Fake\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (status, len(body))
        + body
    )


if __name__ == "__main__":
    _, port, tokens, *each = sys.argv
    behaviour = Behaviour(tokens=int(tokens), speed=not each, delay=0.02 if each else 0.0)
    with FakeSglang(behaviour, port=int(port)) as fake:
        print(f"fake engine at {fake.url}", flush=True)
        threading.Event().wait()
