"""A few easy questions before the real ones: does this target, so rendered and so served, answer at all?

It costs seconds, and it finds a wrong template, a wrong stop token or a parser that hides answers before
hours are spent.
"""

from dflash.data.prompts import Message
from dflash.data.render import Renderer
from dflash.engines.engine import Engine, Request, RequestRefusedError
from dflash.errors import ConfigurationError

_QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write one sentence about the sea.")
_TOKENS = 32


async def check_engine(engine: Engine, renderer: Renderer, max_tokens: int) -> None:
    """ConfigurationError unless every question gets some visible text, thinking included."""
    for number, question in enumerate(_QUESTIONS):
        message: Message = {"role": "user", "content": question}
        prompt_ids = renderer.prompt_ids([message])
        try:
            completion = await engine.generate(
                Request(f"canary-{number}", prompt_ids, min(_TOKENS, max_tokens), seed=number)
            )
        except RequestRefusedError as error:
            raise ConfigurationError(
                f"the target did not answer {question!r} ({error}): see the engine's log, then run again"
            ) from error
        if not renderer.visible(completion.output_ids).strip():
            raise ConfigurationError(
                f"the target answered {question!r} with nothing ({completion.finish_reason}, ids "
                f"{completion.output_ids[:8].tolist()}): check its chat template and stop tokens"
            )
