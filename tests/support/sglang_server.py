"""One SGLang server for a test, with whatever further flags; kept small so that 2 cores can start it."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

from jobs.demo.sglang_cpu import PYTHON, SERVER_ARGS, environment
from tests.support.processes import free_port

START_SECONDS = 600.0


class SglangOnCpu:
    """A context manager; `url` answers when it is entered."""

    def __init__(
        self, model: Path, log: Path, *flags: str, threads: int = 2, dtype: str = "bfloat16"
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._threads = threads
        self._command = [
            *(str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", dtype),
            *("--host", "127.0.0.1", "--port", str(self.port), "--skip-server-warmup"),
            *SERVER_ARGS,
            *flags,
        ]

    def __enter__(self) -> Self:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **environment(self._threads)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(
                    f"SGLang did not start:\n{self._log.read_text(errors='replace')[-5000:]}"
                )
            try:
                with urlopen(f"{self.url}/model_info", timeout=10) as answer:
                    if answer.status == 200:
                        return self
            except (URLError, OSError):
                time.sleep(0.5)

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
