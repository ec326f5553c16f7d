"""`python -m jobs.generate`: one worker of the dataset stage.

Reads the resource, builds what the worker needs, and maps its outcome to an exit code. SIGTERM and Ctrl-C
make it commit what is finished and leave with 143.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator

from dflash.data.prompts import Prompt, PromptCounts, read_prompts
from dflash.data.render import Renderer
from dflash.engines.choice import engine_name, make_engine
from dflash.generation.gate import Judge, Limits
from dflash.generation.job import Job
from dflash.generation.worker import Worker
from dflash.model.facts import TargetFacts
from dflash.model.source import model_folder
from dflash.model.tokenizer import load_tokenizer
from dflash.resource import Drafter
from dflash.resource.generation import Generation
from dflash.storage.location import location_of
from dflash.storage.store import Store
from jobs.outcome import exit_with_outcome
from jobs.settings import GenerateSettings


def spare_torch(generation: Generation) -> None:
    """Keep torch out of a process whose engine is another process: tokenizers do not need it.

    It takes 600 MB and seconds to load, and transformers loads it wherever it is found. For whole processes
    only, and first: what is imported later cannot have it.
    """
    if engine_name(generation) == "sglang":
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # an import of None is refused


def build_worker(resource: Drafter, settings: GenerateSettings) -> Worker:
    """The worker that a resource and this process's settings ask for."""
    spec = resource.spec
    store = Store.open(location_of(spec.storage))
    tokenizer = load_tokenizer(spec.target.model, spec.target.revision)
    facts = TargetFacts.from_folder(model_folder(spec.target.model, spec.target.revision, weights=False))
    limits = Limits.of(spec.generation.gate, spec.drafter.block_size)
    job = Job(
        dataset=settings.dataset,
        name=f"generate-{settings.index}",
        index=settings.index,
        replicas=settings.replicas,
        part_prompts=spec.generation.shard_size,
        max_tokens=spec.generation.max_tokens,
        context_length=min(spec.generation.context_length or facts.max_positions, facts.max_positions),
        seed=spec.generation.sampling.seed,
        hold_out=spec.prompts.hold_out,
        limits=limits,
    )

    def prompts(counts: PromptCounts) -> Iterator[Prompt]:
        base = settings.resource.parent
        return read_prompts(spec.prompts.uri, base, store, limit=spec.prompts.limit, counts=counts)

    return Worker(
        store,
        job,
        prompts=prompts,
        renderer=Renderer(tokenizer, thinking=spec.generation.thinking),
        judge=Judge.of(limits, tokenizer),
        engine=make_engine(
            spec.target,
            spec.generation,
            job.context_length,
            index=settings.index,
            replicas=settings.replicas,
        ),
    )


async def _run(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run()


def _body() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = GenerateSettings.read()
    resource = settings.load_resource()
    spare_torch(resource.spec.generation)
    asyncio.run(_run(build_worker(resource, settings)))


def main() -> None:
    """Run as a process; never returns."""
    exit_with_outcome(_body)


if __name__ == "__main__":
    main()
