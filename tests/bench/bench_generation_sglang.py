"""Tokens a second through our worker, against the engine's own benchmark at the same concurrency.

Both drive the same real SGLang server (on the CPU, with the demo's target), in turns: the worker first, then
`sglang.bench_serving` with prompts and answers of the mean lengths that the worker's had. `ratio` is the
median of worker over it; the worker's side has everything in it: template, gate, Parquet, commits to a real
S3 server.
"""

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from dflash.engines.engine import Completion, Request
from dflash.engines.sglang import Patience, SglangEngine
from dflash.resource.generation import Gate, Generation
from dflash.storage.embedded import EmbeddedStore
from jobs.demo.sglang_cpu import PYTHON
from tests.support.generation import make_worker
from tests.support.sglang_server import SglangOnCpu

CONCURRENCY = 16
TOKENS = 48


def run(quick: bool) -> dict[str, float]:
    """`ratio`, and both speeds in tokens a second."""
    from jobs.demo.model import prepare

    model = prepare()
    prompts, rounds = (48, 1) if quick else (160, 3)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name, EmbeddedStore(Path(name, "s3")) as store:
        folder = Path(name)
        with SglangOnCpu(model, folder / "server.log", "--disable-radix-cache") as server:
            _own_benchmark(server.url, model, CONCURRENCY, folder, 48, TOKENS)  # warms the server up
            for number in range(rounds):
                engine = _worker(store, server.url, model, prompts, folder, number)
                ours.append(engine.tokens / engine.seconds)
                asked, answered = round(engine.asked / prompts), round(engine.tokens / prompts)
                theirs.append(_own_benchmark(server.url, model, prompts, folder, asked, answered))
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "worker_tokens_per_s": statistics.median(ours),
        "bench_serving_tokens_per_s": statistics.median(theirs),
    }


def _own_benchmark(url: str, model: Path, prompts: int, folder: Path, asked: int, answered: int) -> float:
    """Tokens a second that the engine's benchmark gets with so many tokens a prompt and an answer."""
    output = folder / "bench.jsonl"
    output.unlink(missing_ok=True)
    subprocess.run(
        [
            *(str(PYTHON), "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url),
            *("--model", str(model), "--dataset-name", "random-ids", "--random-range-ratio", "1.0"),
            *("--random-input-len", str(asked), "--random-output-len", str(answered)),
            *("--num-prompts", str(prompts), "--max-concurrency", str(CONCURRENCY), "--warmup-requests", "0"),
            *("--disable-tqdm", "--output-file", str(output)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return float(json.loads(output.read_text().splitlines()[-1])["output_throughput"])


class _Counting(SglangEngine):
    """Counts tokens, and the time from the first question after the canaries on."""

    began = 0.0
    seconds = 0.0
    asked = 0
    """Tokens of prompts."""
    tokens = 0
    """Tokens of answers."""

    async def generate(self, request: Request) -> Completion:
        """As always."""
        canary = request.sample_id.startswith("canary")
        if not canary and not self.began:
            self.began = time.monotonic()
        completion = await super().generate(request)
        if not canary:
            self.asked += len(request.prompt_ids)
            self.tokens += len(completion.output_ids)
        return completion


def _worker(
    store: EmbeddedStore, url: str, model: Path, prompts: int, folder: Path, number: int
) -> _Counting:
    from dflash.model.tokenizer import load_tokenizer

    path = folder / f"prompts-{number}.jsonl"
    text = "Continue this list of numbers for as long as you can, and do not stop:"
    path.write_text(
        "".join(json.dumps({"prompt": f"{text} {number} {n} {n + 1}"}) + "\n" for n in range(prompts))
    )
    engine = _Counting(
        Generation(in_flight=CONCURRENCY),
        weights="w",
        patience=Patience.for_answers_of(TOKENS),
        urls=[url],
    )
    worker = make_worker(
        store.store(),
        path,
        urls=[],
        dataset=f"bench-{number}",
        part_prompts=64,
        max_tokens=TOKENS,
        context_length=2048,
        gate=Gate(
            min_supervised_tokens=2,
            truncated="keep",
            max_dropped_share=1.0,
            max_empty_share=1.0,
            max_repetition_share=1.0,
        ),
        engine=engine,
        tokenizer=load_tokenizer(str(model)),
    )
    asyncio.run(worker.run())
    engine.seconds = time.monotonic() - engine.began
    return engine
