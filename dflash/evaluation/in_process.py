"""Evaluation without a server: target and drafter in this process, one request at a time.

Each question is answered by every contender in turn, in alternating order, so that a machine that
slows down or speeds up bears on all alike.
"""

import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash.errors import ConfigurationError
from dflash.evaluation import roofline
from dflash.evaluation.answers import DFLASH, NONE, Answer, Question
from dflash.evaluation.equality import Equality, Scores, compare, summarise
from dflash.evaluation.ledger import Ledger
from dflash.evaluation.roofline import Roofline
from dflash.evaluation.speculative import Decoder
from dflash.model.checkpoint import load_export
from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape, check_fits
from dflash.model.source import model_folder
from dflash.model.target import load_tables, load_target
from dflash.resource.evaluation import Evaluation
from dflash.resource.target import Target

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16


def stop_tokens(folder: Path) -> frozenset[int]:
    """The token ids that end an answer, as generation_config.json says, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        config = json.loads(path.read_text())
        for part in (config, config.get("text_config") or {}):
            declared = part.get("eos_token_id")
            if declared is not None:
                return frozenset(declared if isinstance(declared, list) else [declared])
    raise ConfigurationError(
        f"target.model: neither generation_config.json nor config.json in {folder} has eos_token_id; add it"
    )


class InProcess:
    """Target and drafter, loaded for `evaluation.dtype`."""

    def __init__(self, target: Target, spec: Evaluation, drafters: Mapping[str, Path]) -> None:
        """`drafters` are folders of exported drafters by contender, DFLASH first."""
        self._spec = spec
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._device = device
        self.target = load_target(target.model, target.revision, spec.dtype, device)
        self._tables = load_tables(target.model, target.revision, spec.dtype, device)
        self.stops = stop_tokens(model_folder(target.model, target.revision, weights=False))
        self._drafters: dict[str, DFlashDrafter] = {}
        self.shapes: dict[str, DraftShape] = {}
        for contender, folder in drafters.items():
            drafter, shape = load_export(folder)
            check_fits(shape, self.target.facts)
            self._drafters[contender] = drafter.to(device, getattr(torch, spec.dtype)).eval()
            self.shapes[contender] = shape
        self._decoders = {
            name: Decoder(self.target, self._tables, drafter, self.stops)
            for name, drafter in self._drafters.items()
        }
        self.contenders = (NONE, *self._drafters)

    def run(
        self,
        questions: Sequence[Question],
        ledger: Ledger,
        on_answer: Callable[[Answer], None],
    ) -> None:
        """Answer every question with each contender, `repeats` times; what the ledger has is not redone."""
        todo = [
            (question, contender, repeat)
            for repeat in range(self._spec.repeats)
            for place, question in enumerate(questions)
            for contender in self.contenders[:: 1 if (place + repeat) % 2 == 0 else -1]
            if not ledger.find(contender, 1, repeat, question.sample_id)
        ]
        if todo:
            self._warm_up(todo[0][0])
        try:
            for question, contender, repeat in todo:
                answer = self._answer(question, contender, repeat, self._spec.max_tokens)
                ledger.add(answer)
                on_answer(answer)
        finally:
            ledger.flush()

    def _warm_up(self, question: Question) -> None:
        """First calls allocate and tune; they are not measured."""
        for contender in self.contenders:
            self._answer(question, contender, 0, _WARM_UP_TOKENS)

    def _answer(self, question: Question, contender: str, repeat: int, max_tokens: int) -> Answer:
        decoder = self._decoders[DFLASH if contender == NONE else contender]
        return decoder.answer(
            question,
            contender=contender,
            max_tokens=max_tokens,
            temperature=self._spec.temperature,
            repeat=repeat,
        )

    def compare(self, questions: Sequence[Question], ledger: Ledger) -> Equality:
        """The drafter's answers against plain decoding's, first repeat."""
        differences = []
        for question in questions:
            plain = ledger.find(NONE, 1, 0, question.sample_id)
            other = ledger.find(DFLASH, 1, 0, question.sample_id)
            if plain is None or other is None:
                continue
            difference = compare(
                sample_id=question.sample_id,
                contender=DFLASH,
                prompt=question.prompt_ids,
                plain=plain.tokens,
                other=other.tokens,
                dtype=self._spec.dtype,
                scores=self._scores,
            )
            if difference is not None:
                differences.append(difference)
        return summarise(len(questions), differences)

    def _scores(self, ids: list[int], plain: int, other: int) -> Scores:
        logits = self._decoders[DFLASH].logits(ids)
        return Scores(float(logits[plain]), float(logits[other]), float(logits.max()))

    def roofline(self, *, step_seconds: float, context: float, length: float, speedup: float) -> Roofline:
        """Plain decoding at a mean context of so many tokens, against this device's limits."""
        dtype = getattr(torch, self._spec.dtype)
        facts = self.target.facts
        head = self._tables.head.numel()
        body = _parameters(self.target.decoder) - self._tables.embedding.numel()
        return roofline.assess(
            weight_bytes=(body + head) * dtype.itemsize,
            kv_bytes=2 * facts.layers * facts.kv_heads * facts.head_dim * dtype.itemsize * context,
            draft_bytes=(_parameters(self._drafters[DFLASH]) + head) * dtype.itemsize,
            parameters=body + head,
            concurrency=1,
            step_seconds=step_seconds,
            bandwidth=roofline.probe_bandwidth(self._device, dtype),
            flops=roofline.probe_flops(self._device, dtype),
            acceptance_length=length,
            measured_speedup=speedup,
        )

    def description(self) -> dict[str, Any]:
        """Engine, versions and device, for the report."""
        return {
            "name": "transformers",
            "dtype": self._spec.dtype,
            "device": device_name(),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }


def device_name() -> str:
    """What this process computes on, for the report."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
