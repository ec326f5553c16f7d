"""Tokens a second through our worker, against the engine's own benchmark at the same concurrency.

Both drive the same real SGLang server (on the CPU, with the demo's target) with the same prompts, greedily,
to the same number of tokens each, whatever the target would end on, without streaming; in turns, each first
every other time; with the server's prefix cache off. Before that the benchmark runs once to warm the server
up. `ratio` is the median of worker over benchmark, each from its first request to its last answer. The
worker's side has everything in it: template, gate, Parquet, commits to a real S3 server.
"""

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash.data.prompts import read_prompts
from dflash.data.render import Renderer
from dflash.engines.engine import Completion, Request
from dflash.engines.sglang import Patience, SglangEngine
from dflash.resource.generation import Gate, Generation, Sampling
from dflash.storage.embedded import EmbeddedStore
from jobs.demo.sglang_cpu import PYTHON
from tests.support.generation import make_worker
from tests.support.sglang_server import SglangOnCpu

CONCURRENCY = 16
TOKENS = 48


def run(quick: bool) -> dict[str, float]:
    """`ratio`, and both speeds in tokens a second."""
    from dflash.model.tokenizer import load_tokenizer
    from jobs.demo.model import prepare

    model = prepare()
    tokenizer = load_tokenizer(str(model))
    count, rounds = (96, 3) if quick else (192, 5)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name, EmbeddedStore(Path(name, "s3")) as store:
        folder = Path(name)
        with SglangOnCpu(model, folder / "server.log", "--disable-radix-cache") as server:
            warm = _write_prompts(folder / "warm", 2 * CONCURRENCY, tokenizer)
            _own_benchmark(server.url, model, warm)
            for number in range(rounds):
                prompts = _write_prompts(folder / str(number), count, tokenizer)
                if number % 2:
                    theirs.append(_own_benchmark(server.url, model, prompts))
                ours.append(_worker(store, server.url, prompts, tokenizer))
                if number % 2 == 0:
                    theirs.append(_own_benchmark(server.url, model, prompts))
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "worker_tokens_per_s": statistics.median(ours),
        "bench_serving_tokens_per_s": statistics.median(theirs),
    }


def _write_prompts(folder: Path, count: int, tokenizer: Any) -> Path:
    """The same prompts for both: as conversations for the worker, and as the texts they are rendered to."""
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"Explain what happens in room {folder.name} when {number} people meet."})
            + "\n"
            for number in range(count)
        )
    )
    renderer = Renderer(tokenizer, thinking=True)
    rendered = [renderer.prompt_text(prompt.messages) for prompt in read_prompts(str(prompts), folder)]
    (folder / "rendered.jsonl").write_text(
        "".join(
            json.dumps({"conversations": [{"content": text}, {"content": "not sent"}]}) + "\n"
            for text in rendered
        )
    )
    return folder


def _own_benchmark(url: str, model: Path, folder: Path) -> float:
    """Tokens a second that the engine's benchmark gets."""
    output = folder / "bench.jsonl"
    rendered = folder / "rendered.jsonl"
    prompts = len(rendered.read_text().splitlines())
    subprocess.run(
        [
            *(str(PYTHON), "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url),
            *("--model", str(model), "--dataset-name", "custom", "--dataset-path", str(rendered)),
            *("--sharegpt-output-len", str(TOKENS), "--num-prompts", str(prompts)),
            *("--max-concurrency", str(CONCURRENCY), "--warmup-requests", "0"),
            *("--disable-stream", "--disable-tqdm", "--output-file", str(output)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    found = json.loads(output.read_text().splitlines()[-1])
    assert found["total_output_tokens"] == prompts * TOKENS, found
    return float(found["output_throughput"])


class _Timed(SglangEngine):
    """Takes the time from the first request after the canaries to the last answer, all of one length."""

    began = 0.0
    ended = 0.0
    tokens = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._sampling |= {"ignore_eos": True}  # as the engine's benchmark asks

    async def generate(self, request: Request) -> Completion:
        """As always."""
        canary = request.sample_id.startswith("canary")
        if not canary and not self.began:
            self.began = time.monotonic()
        completion = await super().generate(request)
        if not canary:
            self.tokens += len(completion.output_ids)
            self.ended = time.monotonic()
        return completion


def _worker(store: EmbeddedStore, url: str, folder: Path, tokenizer: Any) -> float:
    """Tokens a second that a worker gets."""
    engine = _Timed(
        Generation(in_flight=CONCURRENCY, sampling=Sampling(temperature=0.0, top_p=1.0, top_k=-1)),
        weights="w",
        patience=Patience.for_answers_of(TOKENS),
        urls=[url],
    )
    prompts = folder / "prompts.jsonl"
    worker = make_worker(
        store.store(),
        prompts,
        urls=[],
        dataset=f"bench-{folder.name}",
        part_prompts=48,
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
        tokenizer=tokenizer,
    )
    asyncio.run(worker.run())
    assert engine.tokens == len(prompts.read_text().splitlines()) * TOKENS, engine.tokens
    return engine.tokens / (engine.ended - engine.began)
