"""Workers of the dataset stage against an engine that answers at once, as one process or many."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash.data.dataset import Dataset
from dflash.data.parts import PartLog
from dflash.data.prompts import Prompt, PromptCounts, read_prompts
from dflash.data.render import Renderer
from dflash.engines.engine import Engine
from dflash.engines.sglang import Patience, SglangEngine
from dflash.generation.gate import Judge, Limits
from dflash.generation.job import Job
from dflash.generation.worker import Worker
from dflash.resource.generation import Gate, Generation
from dflash.storage.location import StoreLocation
from dflash.storage.store import Store
from tests.support.fake_engine import fake_answer
from tests.support.tiny_tokenizer import tiny_tokenizer

PATIENCE = Patience(answer=5.0, progress=5.0, absence=20.0)


def write_prompts(folder: Path, count: int) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}", "id": n}) + "\n" for n in range(count)))
    return path


def make_worker(
    store: Store,
    prompts: Path,
    *,
    urls: list[str],
    dataset: str = "d",
    index: int = 0,
    replicas: int = 1,
    part_prompts: int = 16,
    max_tokens: int = 200,
    context_length: int = 4096,
    gate: Gate | None = None,
    in_flight: int | None = 16,
    patience: Patience = PATIENCE,
    engine: Engine | None = None,
    tokenizer: Any = None,
) -> Worker:
    """A worker of the real kind, with a tiny tokenizer and an SGLang engine at `urls`."""
    tokenizer = tokenizer or tiny_tokenizer()
    limits = Limits.of(gate or Gate(), block_size=16)
    job = Job(
        dataset=dataset,
        name=f"worker-{index}",
        index=index,
        replicas=replicas,
        part_prompts=part_prompts,
        max_tokens=max_tokens,
        context_length=context_length,
        seed=0,
        hold_out=0.0,
        limits=limits,
    )

    def read(counts: PromptCounts) -> Iterator[Prompt]:
        return read_prompts(str(prompts), prompts.parent, store, counts=counts)

    generation = Generation(in_flight=in_flight)
    return Worker(
        store,
        job,
        prompts=read,
        renderer=Renderer(tokenizer, thinking=True),
        judge=Judge.of(limits, tokenizer),
        engine=engine or SglangEngine(generation, weights="w", patience=patience, urls=urls),
    )


def run(worker: Worker) -> Any:
    return asyncio.run(worker.run())


def committed_prompts(store: Store, dataset: str = "d") -> Counter[str]:
    """How often each prompt is accounted for."""
    return Counter(key for commit in PartLog(store, dataset).refresh() for key in commit.prompts)


def check_dataset(store: Store, prompts: Path, *, tokens: int = 40, dataset: str = "d") -> None:
    """Every prompt exactly once, each with the answer that belongs to it, and a manifest that says so."""
    expected = {prompt.key: prompt for prompt in read_prompts(str(prompts), prompts.parent)}
    assert committed_prompts(store, dataset) == Counter(expected.keys())
    renderer = Renderer(tiny_tokenizer(), thinking=True)
    with Dataset.open(store, dataset) as data:
        assert sorted(key.partition("-")[0] for key in data.sample_ids.tolist()) == sorted(expected)
        assert data.manifest.prompts.kept == len(data) == len(expected)
        for number in range(len(data)):
            row = data.fetch(number)
            prompt = expected[row.prompt_key]
            assert row.sample_id == data.sample_ids[number]
            assert np.array_equal(row.prompt_ids, renderer.prompt_ids(prompt.messages))
            assert row.output_ids.tolist() == fake_answer(row.prompt_ids.tolist(), tokens)
            assert row.source_id == prompt.id


def main() -> None:
    """`python -m tests.support.generation LOCATION PROMPTS URL INDEX REPLICAS`: a worker to be killed."""
    location, prompts, url, index, replicas = sys.argv[1:]
    store = Store.open(StoreLocation.model_validate_json(location), patience=60.0)
    worker = make_worker(
        store, Path(prompts), urls=[url], index=int(index), replicas=int(replicas), part_prompts=8
    )
    run(worker)


if __name__ == "__main__":
    main()
