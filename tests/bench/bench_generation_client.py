"""What one worker costs beside its engine: requests a second on one core, and whether memory stays flat.

The worker is the real one: prompts from a file, chat template and tokenizer of a real model, HTTP, the gate,
Parquet, commits to a real S3 server. The engine is a FAKE that answers at once with 512 tokens, in another
process. The worker is pinned to one core and counted in its own CPU time, so that what else runs on the
machine does not count: `requests_per_s` is requests per CPU-second of the worker, from its first request on.
`rss_mib_1k` and `rss_mib_902k` are its peak memory for 1,000 and for 902,087 prompts (with `quick`, for
10,000: the full number takes many minutes).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash.storage.embedded import EmbeddedStore
from tests.support.processes import free_port

TOKENS = 512
MANY = 902_087


def run(quick: bool) -> dict[str, float]:
    """`requests_per_s`, `tokens_per_s`, `rss_mib_1k`, `rss_mib_902k`."""
    from jobs.demo.model import prepare

    model = prepare()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder, "s3")) as server:
        few = _measure(Path(folder), server, model, 1000)
        many = _measure(Path(folder), server, model, 10_000 if quick else MANY)
    return {
        "requests_per_s": many["requests_per_s"],
        "tokens_per_s": many["requests_per_s"] * TOKENS,
        "rss_mib_1k": few["rss_mib"],
        "rss_mib_902k": many["rss_mib"],
    }


def _measure(folder: Path, server: EmbeddedStore, model: Path, count: int) -> dict[str, float]:
    prompts = folder / f"prompts-{count}.jsonl"
    with prompts.open("w") as file:
        for number in range(count):
            text = f"Explain in a few sentences what happens when {number} people meet {number % 97} others."
            file.write(json.dumps({"id": number, "prompt": text}) + "\n")
    port = free_port()
    fake = subprocess.Popen([sys.executable, "-m", "tests.support.fake_engine", str(port), str(TOKENS)])
    try:
        worker = subprocess.run(
            [
                *(sys.executable, "-m", "tests.bench.bench_generation_client"),
                *(str(model), server.location.model_dump_json(), str(prompts), str(port), str(count)),
            ],
            env={**os.environ, **server.environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        figures: dict[str, float] = json.loads(worker.stdout.splitlines()[-1])
        return figures
    finally:
        fake.kill()
        fake.wait()


def _worker(model: str, location: str, prompts: Path, port: int, count: int) -> None:
    """In a process of its own: run the worker, print its figures."""
    import asyncio
    import threading

    from dflash.resource.generation import Gate, Generation
    from jobs.generate import spare_torch

    spare_torch(Generation(engine="sglang"))  # as the job does, before transformers is imported

    from dflash.model.tokenizer import load_tokenizer
    from dflash.storage.location import StoreLocation
    from dflash.storage.store import Store
    from tests.support.generation import make_worker

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    store = Store.open(StoreLocation.model_validate_json(location))
    worker = make_worker(
        store,
        prompts,
        urls=[f"http://127.0.0.1:{port}"],
        dataset=f"bench-{count}",
        part_prompts=512,
        max_tokens=2048,
        gate=Gate(max_dropped_share=1.0),
        in_flight=128,
        tokenizer=load_tokenizer(model),
    )
    marks: list[tuple[float, int]] = []

    def watch() -> None:
        while True:  # CPU time and answers once a tenth of a second, from the first answer on
            if worker.tally.seen:
                marks.append((time.process_time(), worker.tally.seen))
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()
    asyncio.run(worker.run())
    marks.append((time.process_time(), worker.tally.seen))
    (began, first), (ended, last) = marks[0], marks[-1]
    print(json.dumps({"requests_per_s": (last - first) / (ended - began), "rss_mib": _peak_rss_mib()}))


def _peak_rss_mib() -> float:
    """Of this program alone: getrusage's maximum also has the process that it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
