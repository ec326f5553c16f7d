"""Which engine a Drafter's generation section asks for."""

from dflash.engines.engine import Engine
from dflash.model.source import fingerprint, model_folder
from dflash.resource.generation import Generation
from dflash.resource.target import Target


def engine_name(generation: Generation) -> str:
    """`sglang` or `transformers`; `auto` is sglang where a GPU or a running server is there."""
    if generation.engine != "auto":
        return generation.engine
    if generation.urls:
        return "sglang"
    import torch

    return "sglang" if torch.cuda.is_available() else "transformers"


def make_engine(
    target: Target, generation: Generation, context_length: int, *, index: int, replicas: int
) -> Engine:
    """Worker `index`'s engine, not started.

    Running servers are dealt out to the workers; with fewer servers than workers, several share one.
    """
    if engine_name(generation) == "transformers":
        from dflash.engines.transformers import TransformersEngine

        return TransformersEngine(target, generation.sampling, generation.in_flight)
    from dflash.engines.server import ServerProcess
    from dflash.engines.sglang import Patience, SglangEngine

    urls = generation.urls
    mine = urls[index::replicas] or ([urls[index % len(urls)]] if urls else [])
    return SglangEngine(
        generation,
        weights=fingerprint(model_folder(target.model, target.revision)),
        patience=Patience.for_answers_of(generation.max_tokens),
        server=None if mine else ServerProcess(target, generation, context_length),
        urls=mine,
    )
