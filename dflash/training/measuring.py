"""Target 0's side of measuring while training: checkpoints against the target's own greedy answers.

The target answers the held-out prompts once in a run, before it serves; later starts read the answers
from the store. From then on a checkpoint costs no pass of the target: its rounds are replayed
(`dflash.evaluation.replay`) in a thread beside serving.

Costs on target 0: at the first start, plain decoding of samples x maxTokens tokens; always, room for the
drafter's weights in the target's precision and both tables; in host memory the answers' taps. Of a
checkpoint only the weights are fetched. Not for deciding what is measured: that is rank 0's.
"""

import logging
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from dflash import layout
from dflash.errors import ConfigurationError, DflashError
from dflash.evaluation import acceptance
from dflash.evaluation.answers import NONE, Question
from dflash.evaluation.in_process import stop_tokens
from dflash.evaluation.questions import read_questions
from dflash.evaluation.replay import GreedyAnswer, replay
from dflash.evaluation.speculative import Decoder
from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape
from dflash.model.source import model_folder
from dflash.model.target import Tables, TargetModel, load_tables
from dflash.model.tokenizer import load_tokenizer
from dflash.resource import DrafterSpec
from dflash.storage.store import NotFound, Store
from dflash.training.checkpoints import Place, load_weights
from dflash.training.measured import Measured

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_RETRY_SECONDS = 30.0
_JOIN_SECONDS = 5.0


class Measuring:
    """Measures whatever checkpoint is asked for, from `start` to `stop`."""

    def __init__(
        self, spec: DrafterSpec, shape: DraftShape, target: TargetModel, store: Store, run: str
    ) -> None:
        """Have the target's answers at hand. ConfigurationError when there is nothing to measure by."""
        self._shape, self._store, self._run = shape, store, run
        model = spec.target
        self._tables = load_tables(model.model, model.revision, model.dtype, target.device)
        key = layout.measured(run, "answers.json")
        if not store.exists(key):
            store.create(key, orjson.dumps(_decode(spec, target, self._tables, store)))
        self._answers = [_with_taps(row, target, shape) for row in store.get_json(key)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="measuring", daemon=True)

    def start(self) -> None:
        """Measure from now on, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Measure nothing more; what is being measured is left behind."""
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        done: Place | None = None
        pause = _LOOK_SECONDS
        while not self._stop.wait(pause):
            pause = _LOOK_SECONDS
            try:
                done = self._turn(done)
            except (DflashError, RuntimeError, OSError) as error:
                # Serving must go on whatever happens here; rank 0 sees that nothing comes, and says so.
                log.warning("a checkpoint could not be measured: %s", error)
                pause = _RETRY_SECONDS

    def _turn(self, done: Place | None) -> Place | None:
        """Measure what is wanted, if that is not what was done last; gives what is done then."""
        wanted = self._store.find_json(layout.measured(self._run, "wanted.json"))
        if wanted is None or (place := Place(wanted["step"], wanted["attempt"])) == done:
            return done
        if not self._store.exists(_key(self._run, place)):
            try:
                self._measure(place)
            except NotFound:
                log.warning("the checkpoint of step %d is gone before it was measured", place.step)
        return place

    def _measure(self, place: Place) -> None:
        began = time.monotonic()
        state, weights = load_weights(self._store, self._run, place)
        answers = []
        with _beside_serving(self._tables.embedding.device):
            drafter = self._drafter(weights)
            for plain in self._answers:
                if self._stop.is_set():
                    return
                answers.append(replay(drafter, self._tables, plain))
        accepted = [a.accepted for a in answers]
        length = acceptance.acceptance_length([a.emitted for a in answers], accepted)
        measured = Measured(
            step=place.step,
            attempt=place.attempt,
            tokens=state.counts.get("tokens", 0.0),
            acceptance_length=length,
            by_slot=acceptance.by_slot(accepted, self._shape.block_size),
            seconds=time.monotonic() - began,
        )
        self._store.create(_key(self._run, place), orjson.dumps(measured.model_dump()))
        log.info(
            "the checkpoint of step %d accepts %.3f tokens a verification, by %d verifications; %.1f s",
            place.step,
            length.pooled,
            length.verifications,
            measured.seconds,
        )

    def _drafter(self, weights: dict[str, Tensor]) -> DFlashDrafter:
        with torch.device("meta"):
            drafter = DFlashDrafter(self._shape)
        drafter.load_state_dict(weights, assign=True)
        return drafter.to(self._tables.embedding.device, self._tables.embedding.dtype).eval()


def _beside_serving(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU a stream of its own, and first in line: a block must not wait behind whole captures."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
    return nullcontext()


def _with_taps(row: dict[str, Any], target: TargetModel, shape: DraftShape) -> GreedyAnswer:
    question = Question(sample_id=row["sample_id"], prompt_ids=row["prompt_ids"])
    ids = np.array([*row["prompt_ids"], *row["tokens"]], dtype=np.int32)
    taps = target.capture([ids], shape.taps, final=False)[0].taps.cpu()
    return GreedyAnswer(question, row["tokens"], row["room"], taps)


def _decode(spec: DrafterSpec, target: TargetModel, tables: Tables, store: Store) -> list[dict[str, Any]]:
    """The target's greedy answers to the held-out prompts, as they are kept in the store."""
    wanted, model = spec.training.evaluation, spec.target
    tokenizer = load_tokenizer(model.model, model.revision)
    # A sample may be cut in training; beyond that length the drafter was never trained.
    context = min(target.facts.max_positions, spec.training.max_length)
    questions = read_questions(spec, Path.cwd(), store, tokenizer, context, samples=wanted.samples)
    decoder = Decoder(target, tables, None, stop_tokens(model_folder(model.model, model.revision)))
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for question in questions:
        room = min(wanted.max_tokens, context - len(question.prompt_ids))
        answer = decoder.answer(question, contender=NONE, max_tokens=room)
        rows.append(
            {
                "sample_id": question.sample_id,
                "prompt_ids": question.prompt_ids,
                "tokens": answer.tokens,
                "room": room,
            }
        )
    if all(len(row["tokens"]) < 2 for row in rows):
        raise ConfigurationError(
            f"training.evaluation: none of the target's {len(rows)} answers to held-out prompts is longer "
            "than one token, so nothing can be measured; use other prompts or leave training.evaluation out"
        )
    log.info("answered %d held-out prompts to measure by, in %.1f s", len(rows), time.monotonic() - began)
    return rows


def _key(run: str, place: Place) -> str:
    return layout.measured(run, f"step-{place.step:08d}-a{place.attempt}.json")
