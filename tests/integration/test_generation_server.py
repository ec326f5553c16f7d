"""Supervision of an engine's server: restarted when it dies or is stuck, and never left behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash.engines.server import ServerProcess, launch_command
from dflash.engines.sglang import Patience, SglangEngine
from dflash.errors import TemporaryError
from dflash.resource.generation import Generation, Speculation
from dflash.resource.target import Target
from dflash.storage.store import Store
from tests.support.generation import check_dataset, make_worker, write_prompts

TARGET = Target(model="/models/some")


@pytest.fixture
def fake_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the interpreter that has SGLang: starts the fake engine at the port it is told."""
    script = tmp_path / "fake-python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "port = sys.argv[sys.argv.index('--port') + 1]\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'tests.support.fake_engine', port, '40', 'each'])\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("DFLASH_SGLANG_PYTHON", str(script))
    return script


def test_the_command_line_has_the_target_its_own_speculation_and_further_flags_last() -> None:
    generation = Generation(speculation=Speculation(steps=3, draft_tokens=4), server_args=["--dp", "2"])
    command = launch_command(TARGET, generation, 8192, 1234)
    text = " ".join(command)
    assert "-m sglang.launch_server --model-path /models/some --dtype bfloat16" in text
    assert "--context-length 8192" in text
    assert "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1" in text
    assert text.endswith("--dp 2")
    assert "speculative" not in " ".join(launch_command(TARGET, Generation(), 8192, 1234))


def test_a_server_that_is_killed_is_started_again_and_its_requests_are_made_again(
    store: Store, tmp_path: Path, fake_interpreter: Path
) -> None:
    prompts = write_prompts(tmp_path, 300)
    generation = Generation(in_flight=8)
    process = ServerProcess(TARGET, generation, 4096)
    patience = Patience(answer=60.0, progress=60.0, absence=60.0)  # only the kills may restart it
    engine = SglangEngine(generation, weights="w", patience=patience, server=process)
    worker = make_worker(store, prompts, urls=[], engine=engine)

    async def kill_it_twice() -> None:
        task = asyncio.create_task(worker.run())
        for seen in (30, 120):
            while worker.tally.seen < seen:
                await asyncio.sleep(0.01)
            assert process._process is not None
            os.kill(process._process.pid, signal.SIGKILL)
        await task

    asyncio.run(kill_it_twice())
    assert engine.counts.restarts == 2
    check_dataset(store, prompts)
    assert not process.alive


def test_a_server_that_is_stopped_dead_is_found_by_its_silence(
    store: Store, tmp_path: Path, fake_interpreter: Path
) -> None:
    prompts = write_prompts(tmp_path, 100)
    generation = Generation(in_flight=8)
    process = ServerProcess(TARGET, generation, 4096)
    patience = Patience(answer=60.0, progress=3.0, absence=60.0)
    engine = SglangEngine(generation, weights="w", patience=patience, server=process)
    worker = make_worker(store, prompts, urls=[], engine=engine)

    async def stop_it() -> None:
        task = asyncio.create_task(worker.run())
        while worker.tally.seen < 30:
            await asyncio.sleep(0.01)
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGSTOP)  # accepts connections, answers nothing
        await task

    asyncio.run(stop_it())
    assert engine.counts.restarts == 1
    check_dataset(store, prompts)


def test_a_server_that_cannot_start_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'no kernel image is available' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("DFLASH_SGLANG_PYTHON", str(script))
    process = ServerProcess(TARGET, Generation(), 4096)
    with pytest.raises(TemporaryError, match="no kernel image is available"):
        asyncio.run(process.start())


def test_a_worker_that_is_killed_leaves_no_server_behind(tmp_path: Path, fake_interpreter: Path) -> None:
    code = (
        "import asyncio, time\n"
        "from dflash.engines.server import ServerProcess\n"
        "from dflash.resource.generation import Generation\n"
        "from dflash.resource.target import Target\n"
        "server = ServerProcess(Target(model='m'), Generation(), 4096)\n"
        "asyncio.run(server.start())\n"
        "print(server._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        server = int(worker.stdout.readline())
        assert psutil.pid_exists(server)
    finally:
        worker.kill()
        worker.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server) and psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
