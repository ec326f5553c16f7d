"""One prompt through the engine and the gate: a sample for each assistant turn that is to be produced.

A turn is rendered as the server sees it, with the turns produced before it in its history, so what is
trained on is what the target saw. Not for: order, concurrency or storage.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash.data.prompts import Prompt, turns_to_produce
from dflash.data.render import Renderer, Thinking, UnrenderableError
from dflash.data.rows import Ids, Row
from dflash.engines.engine import Completion, Engine, Request, RequestRefusedError, sample_seed
from dflash.generation.gate import Answer, Judge, Tally
from dflash.generation.job import Done, Job

log = logging.getLogger("dflash.generation")

_AHEAD_PROMPTS = 64
_AHEAD_CHARACTERS = 100_000
"""Bounds how long the engine's answers wait while prompts are rendered: some hundredths of a second."""
_NO_IDS = np.zeros(0, np.int32)
_UNANSWERED = Completion(_NO_IDS, "none")
_NO_THINKING = Thinking(None, closed=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with its first turn rendered."""

    prompt: Prompt
    first: Ids | UnrenderableError


class Answerer:
    """Answers prompts; judges and counts every sample."""

    def __init__(self, job: Job, renderer: Renderer, judge: Judge, engine: Engine, tally: Tally) -> None:
        self.tally = tally
        self._job = job
        self._renderer = renderer
        self._judge = judge
        self._engine = engine

    def ask(self, prompts: Iterator[Prompt]) -> Iterator[Asked]:
        """Render prompts, a few ahead of their use: many at a time cost half of what they cost one by one."""
        while True:
            batch: list[Prompt] = []
            texts: list[str | UnrenderableError] = []
            characters = 0
            for prompt in prompts:
                batch.append(prompt)
                try:
                    end = turns_to_produce(prompt.messages)[0]
                    text = self._renderer.prompt_text(prompt.messages[:end], prompt.tools)
                    characters += len(text)
                    texts.append(text)
                except UnrenderableError as error:
                    texts.append(error)
                if len(batch) >= _AHEAD_PROMPTS or characters >= _AHEAD_CHARACTERS:
                    break
            if not batch:
                return
            yield from map(Asked, batch, self._renderer.ids_of_prompts(texts))

    async def answer(self, asked: Asked) -> Done:
        """Produce the prompt's assistant turns, one after the other, each seeing the ones before it.

        After a turn that is dropped the later ones are not asked for: they would stand on a bad one.
        """
        prompt = asked.prompt
        done = Done(prompt)
        history = list(prompt.messages)
        for turn, end in enumerate(turns_to_produce(prompt.messages)):
            prompt_ids = _NO_IDS
            completion, thinking = _UNANSWERED, _NO_THINKING
            reason: str | None
            try:
                if turn > 0:
                    prompt_ids = self._renderer.prompt_ids(history[:end], prompt.tools)
                elif isinstance(asked.first, UnrenderableError):
                    raise asked.first
                else:
                    prompt_ids = asked.first
                completion = await self._complete(f"{prompt.key}-{turn}", prompt_ids)
            except (UnrenderableError, RequestRefusedError) as error:
                reason = error.reason
                log.warning("%s is dropped: %s", prompt.where, error)
            else:
                opened = self._renderer.opens_thinking(prompt_ids)
                thinking = self._renderer.read_thinking(completion.output_ids, opened=opened)
                reason = self._judge.reason(Answer(completion.output_ids, completion.finish_reason, thinking))
            row = Row(
                sample_id=f"{prompt.key}-{turn}",
                prompt_ids=prompt_ids,
                output_ids=completion.output_ids,
                finish_reason=completion.finish_reason,
                think_span=thinking.span,
                prompt_index=prompt.index,
                turn=turn,
                source_id=prompt.id,
                group=prompt.group,
                origin=self._engine.origin,
                dropped=reason,
            )
            self.tally.add(row.sample_id, reason, len(row.output_ids))
            if reason is not None:
                done.rejects.append(row)
                break
            done.kept.append(row)
            if end < len(history):
                history[end] = self._renderer.answer_message(row.output_ids, thinking)
        return done

    async def _complete(self, sample_id: str, prompt_ids: Ids) -> Completion:
        room = self._job.context_length - len(prompt_ids)
        if room < self._job.limits.min_supervised:
            raise RequestRefusedError(
                "prompt_too_long", f"{len(prompt_ids)} tokens of {self._job.context_length} leave {room}"
            )
        return await self._engine.generate(
            Request(
                sample_id=sample_id,
                prompt_ids=prompt_ids,
                max_tokens=min(self._job.max_tokens, room),
                seed=sample_seed(self._job.seed, sample_id),
            )
        )
