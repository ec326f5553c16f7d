"""An SGLang server as a child of this process: started, watched, restarted, and never left behind.

Readiness is asked on an endpoint that generates nothing, since generating probes pile up on a busy server
and can kill it. Whether the server *works* is not asked here: that shows in answers.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from dflash.engines.http import HttpClient
from dflash.errors import ConfigurationError, TemporaryError
from dflash.processes import dying_with_parent
from dflash.resource.generation import Generation
from dflash.resource.target import Target

log = logging.getLogger("dflash.engines")

PYTHON = "DFLASH_SGLANG_PYTHON"
"""Interpreter of the environment that SGLang is installed in, when it is not this one."""
READY_PATH = "/model_info"
"""Answers once the server listens, and generates nothing."""
START_SECONDS = 3600.0
"""Longest time from start to ready: large models load for many minutes."""
_LOG_TAIL = 2000


def launch_command(target: Target, generation: Generation, context_length: int, port: int) -> list[str]:
    """The command line of one server. What `generation.serverArgs` adds comes last and so wins."""
    command = [
        os.environ.get(PYTHON, sys.executable),
        *("-m", "sglang.launch_server"),
        *("--model-path", target.model),
        *("--dtype", target.dtype),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--context-length", str(context_length)),
        "--skip-server-warmup",  # the canary prompts warm it up, and are looked at
    ]
    if target.revision:
        command += ["--revision", target.revision]
    if generation.speculation is not None:
        speculation = generation.speculation
        command += [
            *("--speculative-algorithm", speculation.algorithm),
            *("--speculative-num-steps", str(speculation.steps)),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(speculation.draft_tokens)),
        ]
        if speculation.draft_model:
            command += ["--speculative-draft-model-path", speculation.draft_model]
    return command + list(generation.server_args)


class ServerProcess:
    """One server on a free port of this machine."""

    def __init__(self, target: Target, generation: Generation, context_length: int) -> None:
        if PYTHON not in os.environ and find_spec("sglang") is None:
            raise ConfigurationError(
                "generation.engine is sglang, but it is not installed here: install dflash-suite[sglang], "
                f"set {PYTHON} to an interpreter that has it, or name running servers in generation.urls"
            )
        self._what = (target, generation, context_length)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(tempfile.mkdtemp(prefix="dflash-sglang-"), "server.log")
        self.url = ""

    @property
    def alive(self) -> bool:
        """Whether the process runs; not whether it works."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Launch and wait until it is ready. TemporaryError, with the log's end, when it dies or is slow."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = launch_command(*self._what, port)
        log.info("starting %s, log in %s", " ".join(command), self._log)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                dying_with_parent(command),  # none is left behind when this process is killed
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        began = time.monotonic()
        client = HttpClient(self.url)
        try:
            while True:
                if not self.alive:
                    raise TemporaryError(f"the SGLang server ended while starting: {self.log_tail()}")
                with contextlib.suppress(OSError, TimeoutError):
                    status, _ = await client.get(READY_PATH, 10.0)
                    if status == 200:
                        log.info("server ready after %.0f s", time.monotonic() - began)
                        return
                if time.monotonic() - began > START_SECONDS:
                    raise TemporaryError(
                        f"the SGLang server is not ready after {START_SECONDS:.0f} s: {self.log_tail()}"
                    )
                await asyncio.sleep(0.5)
        finally:
            client.close()

    def log_tail(self) -> str:
        """The end of what the server has said."""
        text = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        return f"...{text.strip()} (whole log: {self._log})"

    def kill(self) -> None:
        """End the server and all its children, at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the server, which is no longer needed. The log of one that failed is kept for reading."""
        worked = self.alive
        self.kill()
        if worked:
            shutil.rmtree(self._log.parent, ignore_errors=True)


async def wait_until_ready(client: HttpClient, seconds: float, otherwise: str) -> None:
    """Until a server that others started answers; TemporaryError, saying `otherwise`, after `seconds`."""
    give_up = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            status, _ = await client.get(READY_PATH, 10.0)
            if status == 200:
                return
        if time.monotonic() > give_up:
            raise TemporaryError(otherwise)
        await asyncio.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
