"""The target in SGLang, over HTTP: `/generate` with token ids, exactly the produced ids back.

Starts and supervises its own server, or uses running ones. Every request has its own deadline; what a
server turns away is tried again with growing, jittered pauses at a lower pace; a server from which nothing
comes any more, however healthy it says it is, is restarted and its requests are made again.
"""

import asyncio
import contextlib
import logging
import random
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.data.rows import Origin
from dflash.engines.engine import Completion, Engine, EngineCounts, Request, RequestRefusedError
from dflash.engines.http import HttpClient
from dflash.engines.pacing import Pace
from dflash.engines.server import ServerProcess, wait_until_ready
from dflash.errors import ConfigurationError, TemporaryError
from dflash.resource.generation import Generation, Sampling

log = logging.getLogger("dflash.engines")

_FIRST_IN_FLIGHT = 32
_MOST_IN_FLIGHT = 2048
_LOAD_PATH = "/v1/loads"
_LOAD_SECONDS = 1.0
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 30.0
_MOST_RESTARTS = 5
_OVERLOADED = (408, 429, 503)
"""Statuses that mean: later."""


@dataclass(frozen=True)
class Patience:
    """How long what is waited for, in seconds."""

    answer: float
    """One request, from being sent to its answer."""
    progress: float
    """Without any answer or token while requests are in flight, before a server counts as stuck."""
    absence: float
    """Without a reachable server, before the engine gives up."""
    tries: int = 2
    """Times that a request may run into its deadline, or get a false answer, before it is refused."""

    @classmethod
    def for_answers_of(cls, tokens: int) -> "Patience":
        """Generous even for a slow engine: 4 tokens a second."""
        return cls(answer=300 + tokens / 4, progress=300 + tokens / 4, absence=1800)


class _Server:
    """One server and what is known of it."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.outstanding = 0
        self.last_answer = time.monotonic()
        self.lost_since: float | None = None
        """When it was first found unreachable, if it is."""
        self._used: list[int | None] = []

    def saw_tokens(self, used: list[int | None]) -> None:
        """Tokens in its cache, by rank: while these change it works, however long answers take."""
        if used != self._used:
            self._used = used
            self.last_answer = time.monotonic()

    @property
    def load(self) -> tuple[bool, int]:
        """Least is best: reachable before lost, then fewest requests in flight."""
        return self.lost_since is not None, self.outstanding


class SglangEngine(Engine):
    """Generates on one server of its own, or on the running servers at `urls`."""

    def __init__(
        self,
        generation: Generation,
        *,
        weights: str,
        patience: Patience,
        server: ServerProcess | None = None,
        urls: list[str] | None = None,
    ) -> None:
        self.counts = EngineCounts()
        self.origin = Origin("sglang", "", weights)
        self._sampling = _sampling_parameters(generation.sampling)
        self._patience = patience
        self._process = server
        self._servers = [_Server(HttpClient(url)) for url in urls or []]
        most = generation.in_flight or _MOST_IN_FLIGHT
        first = generation.in_flight or _FIRST_IN_FLIGHT
        self._pace = Pace(first, most)
        self._failure: TemporaryError | None = None
        self._restarts_without_answer = 0
        self._helpers: list[asyncio.Task[None]] = []
        self._back = asyncio.Event()
        """Set while servers are there; cleared during a restart."""

    @property
    def in_flight(self) -> int:
        """Follows the servers' queues."""
        return self._pace.now

    async def start(self) -> None:
        """Start the server if it is ours, and wait for an answer of each."""
        if self._process is not None:
            await self._process.start()
            self._servers = [_Server(HttpClient(self._process.url))]
        for server in self._servers:
            await wait_until_ready(
                server.client,
                self._patience.absence,
                f"no SGLang server answers at {server.client.url}: start it, or correct generation.urls",
            )
        self.origin = Origin("sglang", await self._version(), self.origin.weights)
        self._back.set()
        self._helpers = [asyncio.create_task(self._follow_queues()), asyncio.create_task(self._watch())]

    async def _version(self) -> str:
        """SGLang's own version, where the server tells it."""
        with contextlib.suppress(OSError, TimeoutError):
            status, info = await self._servers[0].client.get("/server_info", 30.0)
            if status == 200 and isinstance(info, dict):
                return str(info.get("version", ""))
        return ""

    async def rendered(self, messages: list[dict[str, Any]], *, thinking: bool) -> list[int] | None:
        """As the server renders it for a chat completion; None where it has no such endpoint."""
        body = {
            "model": "default",
            "messages": messages,
            "chat_template_kwargs": {"enable_thinking": thinking},
        }
        with contextlib.suppress(OSError, TimeoutError):
            status, answer = await self._servers[0].client.post("/tokenize", body, 60.0)
            if status == 200 and isinstance(answer, dict) and isinstance(answer.get("tokens"), list):
                return [int(token) for token in answer["tokens"]]
        return None

    # One request

    async def generate(self, request: Request) -> Completion:
        """Produce one answer, trying again for as long as that can help."""
        self.counts.requests += 1
        body = {
            "input_ids": request.prompt_ids,
            "sampling_params": {
                **self._sampling,
                "max_new_tokens": request.max_tokens,
                "sampling_seed": request.seed,
            },
        }
        faults = 0
        pause = _FIRST_PAUSE
        while True:
            if not self._back.is_set():
                await self._back.wait()
            if self._failure is not None:
                raise self._failure
            server = min(self._servers, key=lambda candidate: candidate.load)
            server.outstanding += 1
            try:
                status, answer = await server.client.post("/generate", body, self._patience.answer)
                server.lost_since = None
                if status == 200:
                    completion = _completion(answer, request)
                    server.last_answer = time.monotonic()
                    self._restarts_without_answer = 0
                    return completion
                problem = f"status {status}: {_message(answer)}"
                if status in _OVERLOADED:
                    self._pace.overloaded(time.monotonic())
                elif status < 500:
                    raise RequestRefusedError("refused", problem)
                else:
                    faults += 1
            except _FalseAnswerError as error:
                faults += 1
                problem = str(error)
            except TimeoutError:
                faults += 1
                problem = f"no answer in {self._patience.answer:.0f} s"
            except OSError as error:
                problem = str(error) or type(error).__name__
                server.lost_since = server.lost_since or time.monotonic()
            finally:
                server.outstanding -= 1
            if faults >= self._patience.tries:
                raise RequestRefusedError("unanswered", problem)
            self.counts.retries += 1
            log.info("sample %s: %s; trying again", request.sample_id, problem)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    # Beside the requests

    async def _follow_queues(self) -> None:
        """Ask each server how long its queue is; one that does not tell leaves the pace as it is."""
        while True:
            await asyncio.sleep(_LOAD_SECONDS)
            waiting = asked = 0
            for server in self._servers:
                with contextlib.suppress(OSError, TimeoutError):
                    status, answer = await server.client.get(_LOAD_PATH, 10.0)
                    if status == 200 and isinstance(answer, dict):
                        loads = answer.get("loads", [])
                        server.saw_tokens([load.get("num_used_tokens") for load in loads])
                        waiting += sum(int(load.get("num_waiting_reqs", 0)) for load in loads)
                        asked += server.outstanding
            if asked:
                self._pace.queue_seen(waiting, asked)

    async def _watch(self) -> None:
        """Restart our server when it ended or is stuck; give up on others' servers that are."""
        while True:
            await asyncio.sleep(min(1.0, self._patience.progress / 4))
            now = time.monotonic()
            for server in self._servers:
                if server.outstanding == 0:
                    server.last_answer = now
            lost = [s for s in self._servers if s.lost_since and now - s.lost_since > self._patience.absence]
            stuck = [s for s in self._servers if now - s.last_answer > self._patience.progress]
            if self._process is None and len(lost) == len(self._servers):
                self._fail(
                    f"no server of generation.urls has been reachable for {self._patience.absence:.0f} s"
                )
            elif self._process is None and stuck:
                names = ", ".join(server.client.url for server in stuck)
                self._fail(
                    f"{names} answered nothing for {self._patience.progress:.0f} s with requests in flight: "
                    "restart the server there"
                )
            elif self._process is not None and (stuck or not self._process.alive):
                what = f"answered nothing for {self._patience.progress:.0f} s" if stuck else "ended"
                await self._restart(self._process, what)
            if self._failure is not None:
                return

    async def _restart(self, process: ServerProcess, what: str) -> None:
        self._restarts_without_answer += 1
        if self._restarts_without_answer > _MOST_RESTARTS:
            self._fail(f"the SGLang server {what}, {_MOST_RESTARTS} times in a row: {process.log_tail()}")
            return
        log.warning("the SGLang server %s; restarting it", what)
        self.counts.restarts += 1
        self._back.clear()
        old = self._servers[0]
        process.kill()  # its connections break, and their requests wait for the next server
        old.client.abandon()
        old.client.close()
        try:
            await process.start()
        except TemporaryError as error:
            self._fail(str(error))
            return
        self._servers = [_Server(HttpClient(process.url))]
        self._back.set()

    def _fail(self, sentence: str) -> None:
        self._failure = TemporaryError(sentence)
        self._back.set()
        for server in self._servers:
            server.client.abandon()

    async def close(self) -> None:
        """Stop helpers and our server."""
        for helper in self._helpers:
            helper.cancel()
        if self._helpers:
            await asyncio.wait(self._helpers)
        for server in self._servers:
            server.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)


class _FalseAnswerError(Exception):
    """An answer that contradicts itself or the request."""


def _completion(answer: Any, request: Request) -> Completion:
    try:
        ids = answer["output_ids"]
        meta = answer["meta_info"]
        said, prompt = meta["completion_tokens"], meta["prompt_tokens"]
        reason = meta["finish_reason"]
        kind = reason["type"] if isinstance(reason, dict) else str(reason)
    except (TypeError, KeyError) as error:
        raise _FalseAnswerError(f"an answer without {error}") from error
    if kind == "abort":
        raise _FalseAnswerError(f"aborted by the server: {reason}")
    if len(ids) != said or said > request.max_tokens:
        raise _FalseAnswerError(
            f"{len(ids)} tokens came, {said} were announced, {request.max_tokens} asked for"
        )
    if prompt != len(request.prompt_ids):
        raise ConfigurationError(
            f"sample {request.sample_id}: {len(request.prompt_ids)} prompt tokens were sent and the server "
            f"saw {prompt}, so it changes prompts: remove the server argument that does"
        )
    try:
        packed = struct.pack(f"{said}i", *ids)  # half the time of numpy's own way from a list
    except struct.error as error:
        raise _FalseAnswerError(f"output_ids are no token ids ({error})") from error
    return Completion(np.frombuffer(packed, np.int32), kind)


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:300]


def _sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
