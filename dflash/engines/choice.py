"""Which engine a Drafter's generation section asks for."""

from dflash.engines.engine import Engine
from dflash.resource.generation import Generation
from dflash.resource.target import Target


def make_engine(target: Target, generation: Generation, context_length: int) -> Engine:
    """The engine, not started. `auto` is sglang where a GPU or a server is there, else transformers."""
    name = generation.engine
    if name == "auto":
        import torch

        name = "sglang" if generation.urls or torch.cuda.is_available() else "transformers"
    if name == "sglang":
        raise NotImplementedError
    from dflash.engines.transformers import TransformersEngine

    return TransformersEngine(target, generation.sampling, generation.in_flight)
