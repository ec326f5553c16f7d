"""Lossless speculative decoding in this process: one loop, with a drafter or without.

Each round the drafter proposes a block from the last token and the taps of what was newly accepted;
the target verifies the block in one pass; the drafts that equal the target's own choices are
emitted, and one token more. Without a drafter the block is the last token alone, so plain decoding
is the same loop with the same cache and a fair base for speed.

One answer at a time. Not for serving, nor for speculation with targets that have recurrent layers, whose
state cannot be taken back to an earlier token (ConfigurationError; SGLang can).
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from dflash.errors import ConfigurationError
from dflash.evaluation.answers import NONE, Answer, Question, accept, cut
from dflash.model.drafter import DFlashDrafter
from dflash.model.target import Tables, TargetModel

log = logging.getLogger(__name__)


class Sampler:
    """Chooses tokens from logits; a function of (seed, position) alone.

    At temperature 0 the largest logit. Else by Gumbel's trick, with the noise of a position drawn
    from its own seed: whatever pass a position is computed in, the same token is drawn, so that
    speculation can be compared with plain decoding token by token at any temperature.
    """

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self._temperature = temperature
        self._seed = seed
        self._generator = torch.Generator(device)

    def choose(self, logits: Tensor, position: int) -> list[int]:
        """Tokens for consecutive positions from `position`, logits [N, V]."""
        if self._temperature == 0.0:
            chosen: list[int] = logits.argmax(dim=-1).tolist()
            return chosen
        noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for row in range(logits.shape[0]):
            self._generator.manual_seed(_seed_of(self._seed, position + row))
            noise[row].exponential_(generator=self._generator)
        # argmax(l / T - log E) with E exponential is a draw from softmax(l / T).
        sampled: list[int] = (logits.float() / self._temperature - noise.log()).argmax(dim=-1).tolist()
        return sampled


def _seed_of(seed: int, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=7).digest())


class Decoder:
    """A target, its tables, and at most one drafter."""

    def __init__(
        self, target: TargetModel, tables: Tables, drafter: DFlashDrafter | None, stops: frozenset[int]
    ) -> None:
        """`stops` are the token ids that end an answer."""
        self._target = target
        self._tables = tables
        self._drafter = drafter
        self._stops = stops
        self._layers: nn.ModuleList = target.decoder.layers  # type: ignore[assignment]

    @torch.inference_mode()
    def answer(
        self,
        question: Question,
        *,
        contender: str,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        repeat: int = 0,
    ) -> Answer:
        """Answer a question; `contender` `none` decodes without the drafter."""
        drafter = None if contender == NONE else self._drafter
        limit = self._target.facts.max_positions
        ids = question.prompt_ids
        room = min(max_tokens, limit - len(ids))
        if room < 1:
            raise ConfigurationError(
                f"evaluation prompt {question.sample_id}: {len(ids)} tokens leave no room for an answer "
                f"in the target's context of {limit}; leave it out"
            )
        sampler = Sampler(temperature, _seed_of(seed, _number(question.sample_id)), self._target.device)
        cache = self._new_cache(taken_back=drafter is not None)
        proposer = Proposer(drafter, self._tables) if drafter is not None else None
        accepted: list[int] = []
        emitted: list[int] = []
        draft_seconds = 0.0
        started = time.perf_counter()
        with self._taps(drafter.shape.taps if drafter is not None else ()) as captured:
            hidden = self._forward(ids, cache)
            tokens, reason = cut(sampler.choose(self._logits(hidden[-1:]), len(ids)), self._stops, room)
            first_token = time.perf_counter()
            fresh = len(ids)  # tokens of the last pass that are part of the text
            while not reason:
                position = len(ids) + len(tokens) - 1
                room_now = room - len(tokens)
                draft: list[int] = []
                if proposer is not None:
                    before = time.perf_counter()
                    draft = proposer.propose(tokens[-1], _joined(captured, fresh), position)[: room_now - 1]
                    draft_seconds += time.perf_counter() - before
                hidden = self._forward([tokens[-1], *draft], cache)
                posterior = sampler.choose(self._logits(hidden), position + 1)
                agreed, round_tokens = accept(draft, posterior)
                kept, reason = cut(round_tokens, self._stops, room_now)
                tokens += kept
                accepted.append(min(agreed, len(kept)))
                emitted.append(len(kept))
                if len(draft) > agreed:
                    cache.crop(agreed - len(draft))  # minus the number of positions to drop
                fresh = agreed + 1
        return Answer(
            sample_id=question.sample_id,
            contender=contender,
            repeat=repeat,
            tokens=tokens,
            accepted=accepted,
            emitted=emitted,
            finish_reason=reason,
            prefill_seconds=first_token - started,
            decode_seconds=time.perf_counter() - first_token,
            draft_seconds=draft_seconds,
        )

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """The target's logits [V] after `ids`, in fp32, from one pass over all of them."""
        return self._logits(self._forward(ids, self._new_cache(taken_back=False))[-1:])[0].float()

    def _new_cache(self, *, taken_back: bool) -> Any:
        """An empty cache; `taken_back` says that tokens will be taken out of it again."""
        cache = DynamicCache(config=self._target.decoder.config)  # type: ignore[arg-type]
        if taken_back and any(not layer.is_croppable for layer in cache.layers):
            raise ConfigurationError(
                "evaluation.engine: this target keeps a recurrent or windowed state, which cannot be taken "
                "back after a rejected draft in process; set engine: sglang"
            )
        return cache

    def _forward(self, ids: Sequence[int], cache: Any) -> Tensor:
        """Final normed states [N, D] of new tokens, whose keys and values enter the cache."""
        tokens = torch.tensor([ids], device=self._target.device)
        output = self._target.decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
        states: Tensor = output.last_hidden_state[0]
        return states

    def _logits(self, states: Tensor) -> Tensor:
        return functional.linear(states, self._tables.head)

    @contextmanager
    def _taps(self, taps: Sequence[int]) -> Iterator[list[Tensor]]:
        """While this runs, the list holds the tapped layers' outputs of the last pass, each [N, D]."""
        captured: list[Tensor] = [torch.empty(0)] * len(taps)

        def hook_of(place: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                captured[place] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        handles = [self._layers[tap].register_forward_hook(hook_of(place)) for place, tap in enumerate(taps)]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


class Proposer:
    """A drafter at work on one answer."""

    def __init__(self, drafter: DFlashDrafter, tables: Tables) -> None:
        self._drafter = drafter
        self._tables = tables
        self._cache = drafter.new_cache()
        shape = drafter.shape
        masks = torch.full((shape.block_size - 1,), shape.mask_token_id, device=tables.embedding.device)
        self._mask_rows = tables.embedding[masks]

    def propose(self, last: int, new_taps: Tensor, position: int) -> list[int]:
        """Drafts for slots 1..B-1 after token `last` at `position`; `new_taps` since the last call."""
        inputs = torch.cat([self._tables.embedding[last : last + 1], self._mask_rows])
        states = self._drafter.propose(inputs, new_taps, self._cache, position)
        # The best proposals whatever the temperature: verification alone decides what is emitted.
        drafts: list[int] = self._drafter.choose(
            states, last, self._tables.embedding, self._tables.head
        ).tolist()
        return drafts


def _joined(captured: list[Tensor], count: int) -> Tensor:
    """Taps [count, K*D] of the first `count` tokens of the last pass."""
    return torch.cat([states[:count] for states in captured], dim=-1)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
