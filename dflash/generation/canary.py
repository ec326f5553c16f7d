"""A few easy questions before the real ones: does this target, so rendered and so served, answer at all?

It costs seconds, and it finds a wrong template, a wrong stop token or a parser that hides answers before
hours are spent.
"""

import asyncio

from dflash.data.prompts import Message
from dflash.data.render import Renderer
from dflash.engines.engine import Engine, Request, RequestRefusedError
from dflash.errors import ConfigurationError

_QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write one sentence about the sea.")
_TOKENS = 32


_CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Spain?"},
]


async def check_engine(engine: Engine, renderer: Renderer, max_tokens: int) -> None:
    """ConfigurationError unless the engine renders as we do and every question gets some visible text."""
    await _check_rendering(engine, renderer)
    tokens = min(_TOKENS, max_tokens)
    await asyncio.gather(*[_ask(engine, renderer, number, tokens) for number in range(len(_QUESTIONS))])


async def _ask(engine: Engine, renderer: Renderer, number: int, max_tokens: int) -> None:
    question = _QUESTIONS[number]
    prompt_ids = renderer.prompt_ids([{"role": "user", "content": question}])
    try:
        completion = await engine.generate(Request(f"canary-{number}", prompt_ids, max_tokens, seed=number))
    except RequestRefusedError as error:
        raise ConfigurationError(
            f"the target did not answer {question!r} ({error}): see the engine's log, then run again"
        ) from error
    if not renderer.visible(completion.output_ids).strip():
        raise ConfigurationError(
            f"the target answered {question!r} with nothing ({completion.finish_reason}, ids "
            f"{completion.output_ids[:8].tolist()}): check its chat template and stop tokens"
        )


async def _check_rendering(engine: Engine, renderer: Renderer) -> None:
    """Hidden states only fit the answers if whoever serves the target sees the prompts that we make."""
    for messages in ([{"role": "user", "content": _QUESTIONS[0]}], _CONVERSATION):
        theirs = await engine.rendered(messages, thinking=renderer.thinking)
        ours = renderer.prompt_ids(messages).tolist()
        if theirs is None or theirs == ours:
            continue
        pairs = zip(ours, theirs, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        raise ConfigurationError(
            "the server does not render a conversation as the target's chat template does: ids differ from "
            f"position {place} on (ours {ours[place:][:4]}, the server's {theirs[place:][:4]}): "
            "serve with the tokenizer and the chat template of target.model"
        )
