"""Which prompts are asked: the held-out ones, or the sets that the spec names, rendered to tokens.

Of a conversation with several assistant turns, the last is asked. The same rendering as for
generation: what is measured is what was trained on.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.data.prompts import Prompt, is_held_out, read_prompts, turns_to_produce
from dflash.data.render import Renderer, UnrenderableError
from dflash.errors import ConfigurationError
from dflash.evaluation.answers import Question, writing_system
from dflash.resource import DrafterSpec

if TYPE_CHECKING:
    from dflash.storage.store import Store

log = logging.getLogger(__name__)

HELD_OUT = "held-out"


def read_questions(
    spec: DrafterSpec, base: Path, store: "Store", tokenizer: Any, context: int, *, samples: int
) -> list[Question]:
    """At most `samples` of each set, in file order.

    `context` is the most positions the target has; prompts that leave no room for the answer, and
    those that the template refuses, are left out with a warning. ConfigurationError when a set is empty.
    """
    renderer = Renderer(tokenizer, thinking=spec.generation.thinking)
    questions: dict[str, Question] = {}
    for name, prompts in _sets(spec, base, store):
        kept, left_out = 0, 0
        for prompt in prompts:
            if kept == samples:
                break
            try:
                question = _render(prompt, name, renderer)
            except UnrenderableError:
                left_out += 1
                continue
            if len(question.prompt_ids) + 2 > context:
                left_out += 1
                continue
            # Ids that people give may repeat; a line number tells such prompts apart.
            name_taken = question.sample_id in questions
            key = f"{question.sample_id}#{prompt.line}" if name_taken else question.sample_id
            questions[key] = question.model_copy(update={"sample_id": key})
            kept += 1
        if left_out:
            log.warning(
                "%s: %d prompts are left out: the template refuses them, or they fill the context",
                name,
                left_out,
            )
        if not kept:
            raise ConfigurationError(
                f"evaluation: set {name} has no prompt to ask; raise prompts.holdOut above "
                f"{spec.prompts.hold_out}, or name sets in evaluation.prompts"
            )
    return list(questions.values())


def _sets(spec: DrafterSpec, base: Path, store: "Store") -> Iterator[tuple[str, Iterable[Prompt]]]:
    for named in spec.evaluation.prompts:
        yield named.name, read_prompts(named.uri, base, store)
    if not spec.evaluation.prompts:
        prompts = read_prompts(spec.prompts.uri, base, store, limit=spec.prompts.limit)
        yield HELD_OUT, (p for p in prompts if is_held_out(p, spec.prompts.hold_out))


def _render(prompt: Prompt, prompt_set: str, renderer: Renderer) -> Question:
    messages = prompt.messages[: turns_to_produce(prompt.messages)[-1]]
    asked = next(m["content"] for m in reversed(messages) if m["role"] == "user")
    return Question(
        sample_id=f"{prompt_set}/{prompt.id}",
        prompt_ids=renderer.prompt_ids(messages, prompt.tools).tolist(),
        prompt_set=prompt_set,
        group=prompt.group or "",
        language=writing_system(asked),
        thinking=renderer.thinking,
        tools=bool(prompt.tools),
    )
