"""The target in this process, by transformers: the engine for a machine without a GPU.

Continuous batching: sequences of any length decode together, and one that ends is replaced at once. The
model runs in its own thread; requests reach it through a queue. Targets with recurrent layers, whose state
does not lie in slots, are run one sequence at a time.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from dflash.data.rows import Origin
from dflash.engines.engine import Completion, Engine, EngineCounts, Request, RequestRefusedError
from dflash.engines.sampling import choose
from dflash.engines.slots import ATTENTION, SlotCache
from dflash.errors import ConfigurationError, TemporaryError
from dflash.model.facts import TargetFacts
from dflash.model.source import fingerprint, model_folder
from dflash.resource.generation import Sampling
from dflash.resource.target import Target

log = logging.getLogger("dflash.engines")

_SLOTS = 64
_PREFILL_TOKENS = 4096
"""Most padded prompt tokens in one prefill: bounds its memory and the pause it makes in decoding."""


@dataclass
class _Sequence:
    """One request on its way. `output` grows; its last token is not yet in the cache."""

    request: Request
    answer: "Future[Completion]"
    length: int = 0
    """Positions in the cache."""
    output: list[int] = field(default_factory=list)


class TransformersEngine(Engine):
    """Runs the target on this machine's GPU, else on its CPU."""

    def __init__(self, target: Target, sampling: Sampling, slots: int | None = None) -> None:
        self.counts = EngineCounts()
        self._target = target
        self._sampling = sampling
        self._slots = slots or _SLOTS
        self._waiting: queue.SimpleQueue[_Sequence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._closing = False
        self._failure: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Half as many again as there are slots, so that a free one never waits for the loop."""
        return self._slots + max(1, self._slots // 2)

    async def start(self) -> None:
        """Load the weights."""
        await asyncio.to_thread(self._load)
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        """Produce one answer; RequestRefusedError for an empty prompt or a token outside the vocabulary."""
        ids = request.prompt_ids
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._facts.vocab_size:
            raise RequestRefusedError("refused", "the prompt is empty or has ids outside the vocabulary")
        if self._failure is not None:
            raise TemporaryError(f"the engine has failed: {self._failure}") from self._failure
        self.counts.requests += 1
        sequence = _Sequence(request, Future())
        self._waiting.put(sequence)
        return await asyncio.wrap_future(sequence.answer)

    async def close(self) -> None:
        """Stop after the step that is being made."""
        self._closing = True
        self._waiting.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    def _load(self) -> None:
        folder = model_folder(self._target.model, self._target.revision)
        self._facts = TargetFacts.from_folder(folder)
        if self._facts.hybrid or "sliding_attention" in self._facts.layer_kinds:
            self._slots = 1
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        began = time.monotonic()
        # The class that config.json names, so that wrappers with a vision part load as they are.
        factory = getattr(transformers, self._facts.architecture, None) or AutoModelForCausalLM
        try:
            model: Any = factory.from_pretrained(
                folder,
                dtype=getattr(torch, self._target.dtype),
                attn_implementation=ATTENTION if self._slots > 1 else "sdpa",
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"target.model: {folder} cannot be loaded: {error}") from error
        self._model = model.to(self._device).eval()
        self._stops = _stop_ids(self._model)
        self.origin = Origin("transformers", transformers.__version__, fingerprint(folder))
        log.info("loaded %s in %.1f s", folder, time.monotonic() - began)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                if self._slots > 1:
                    self._decode_together()
                else:
                    self._decode_alone()
        except BaseException as error:  # handed to every request that waits
            log.exception("the engine failed")
            self._failure = error
            self._fail_waiting(error)

    def _fail_waiting(self, error: BaseException) -> None:
        for sequence in list(getattr(self, "_active", [])):
            _resolve(sequence, error)
        while True:
            try:
                sequence_or_end = self._waiting.get_nowait()
            except queue.Empty:
                return
            if sequence_or_end is not None:
                _resolve(sequence_or_end, error)

    # Many sequences at once

    def _decode_together(self) -> None:
        self._active: list[_Sequence] = []  # place in the list is the slot
        cache = SlotCache(self._facts.layers, self._slots, self._device)
        pending: deque[_Sequence] = deque()
        while not self._closing:
            self._collect(pending, wait=not self._active and not pending)
            self._admit(cache, pending)
            if self._active:
                self._step(cache)

    def _collect(self, pending: deque[_Sequence], *, wait: bool) -> None:
        while True:
            try:
                sequence = self._waiting.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if sequence is None:
                return
            if not sequence.answer.cancelled():
                pending.append(sequence)

    def _admit(self, cache: SlotCache, pending: deque[_Sequence]) -> None:
        """Prefill waiting prompts into free slots, several in one right-padded forward."""
        while pending and len(self._active) < self._slots:
            group: list[_Sequence] = []
            longest = 0
            while pending and len(self._active) + len(group) < self._slots:
                longest = max(longest, len(pending[0].request.prompt_ids))
                if group and longest * (len(group) + 1) > _PREFILL_TOKENS:
                    break
                group.append(pending.popleft())
            filled, logits = self._prefill([sequence.request for sequence in group])
            tokens = self._choose(logits, group)
            for row, (sequence, token) in enumerate(zip(group, tokens, strict=True)):
                sequence.length = len(sequence.request.prompt_ids)
                if not self._take(sequence, token):
                    cache.place(len(self._active), filled, row, sequence.length)
                    self._active.append(sequence)

    def _prefill(self, requests: list[Request]) -> tuple[DynamicCache, torch.Tensor]:
        """One forward over prompts padded on the right, where causality hides the padding."""
        lengths = [len(request.prompt_ids) for request in requests]
        ids = np.zeros((len(requests), max(lengths)), np.int64)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = request.prompt_ids
        filled = DynamicCache(config=self._model.config.get_text_config())
        last = sorted({length - 1 for length in lengths})  # logits of these positions only
        out = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            past_key_values=filled,
            use_cache=True,
            logits_to_keep=torch.tensor(last, device=self._device),
        )
        rows = torch.arange(len(requests), device=self._device)
        places = torch.tensor([last.index(length - 1) for length in lengths], device=self._device)
        return filled, out.logits[rows, places]

    def _step(self, cache: SlotCache) -> None:
        """Decode one token for every active sequence."""
        active = self._active
        lengths = [sequence.length for sequence in active]
        cache.advance(lengths)
        out = self._model(
            input_ids=torch.tensor([[sequence.output[-1]] for sequence in active], device=self._device),
            position_ids=torch.tensor(lengths, device=self._device)[:, None],
            attention_mask=cache.mask(),
            past_key_values=cache,
            use_cache=True,
        )
        tokens = self._choose(out.logits[:, -1], active)
        ended = []
        for slot, (sequence, token) in enumerate(zip(active, tokens, strict=True)):
            sequence.length += 1
            if self._take(sequence, token) or sequence.answer.cancelled():
                ended.append(slot)
        for slot in reversed(
            ended
        ):  # the last one moves into the hole, so that slots in use stay the first n
            last = active.pop()
            if slot < len(active):
                cache.move(len(active), slot, last.length)
                active[slot] = last

    def _choose(self, logits: torch.Tensor, sequences: list[_Sequence]) -> list[int]:
        seeds = np.array([sequence.request.seed for sequence in sequences], np.int64)
        positions = np.array([len(sequence.output) for sequence in sequences], np.int64)
        return [int(token) for token in choose(logits, self._sampling, seeds, positions)]

    def _take(self, sequence: _Sequence, token: int) -> bool:
        """Add a token; True when the answer is complete, which is then handed over."""
        sequence.output.append(token)
        if token in self._stops:
            reason = "stop"
        elif len(sequence.output) >= sequence.request.max_tokens:
            reason = "length"
        else:
            return False
        _resolve(sequence, Completion(np.array(sequence.output, np.int32), reason))
        return True

    # One sequence at a time

    def _decode_alone(self) -> None:
        while not self._closing:
            sequence = self._waiting.get()
            if sequence is None or sequence.answer.cancelled():
                continue
            cache, logits = self._prefill([sequence.request])
            while not self._take(sequence, self._choose(logits, [sequence])[0]):
                if self._closing or sequence.answer.cancelled():
                    break
                token = torch.tensor([[sequence.output[-1]]], device=self._device)
                logits = self._model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]


def _resolve(sequence: _Sequence, result: Completion | BaseException) -> None:
    """Hand over an answer, unless whoever asked has gone."""
    if not sequence.answer.set_running_or_notify_cancel():
        return
    if isinstance(result, Completion):
        sequence.answer.set_result(result)
    else:
        sequence.answer.set_exception(TemporaryError(f"the engine has failed: {result}"))


def _stop_ids(model: Any) -> frozenset[int]:
    """Ids that end a turn, as the model's generation settings declare them."""
    declared = model.generation_config.eos_token_id
    if declared is None:
        declared = model.config.get_text_config().eos_token_id
    if declared is None:
        raise ConfigurationError(
            "target.model: neither generation_config.json nor config.json has eos_token_id"
        )
    return frozenset(declared if isinstance(declared, list) else [declared])
