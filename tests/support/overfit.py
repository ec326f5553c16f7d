"""A drafter that really accepts: trained in seconds on a tiny target's own answers.

Also trained wrongly on purpose, as the usual faults have it, to see whether they are found.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dflash.evaluation.answers import NONE, Question
from dflash.evaluation.speculative import Decoder
from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape
from dflash.model.target import Tables, TargetModel, load_tables, load_target
from dflash.objective.batch import PackedBatch, Sample, pack
from dflash.objective.step import block_step
from dflash.objective.weights import Objective

Text = tuple[list[int], list[int]]


def loaded(folder: Path) -> tuple[TargetModel, Tables]:
    """Target and tables in fp32."""
    return load_target(str(folder), dtype="float32"), load_tables(str(folder), dtype="float32")


def answers_of(target: TargetModel, tables: Tables, count: int = 10, tokens: int = 40) -> list[Text]:
    """Prompts and the target's greedy answers."""
    decoder = Decoder(target, tables, None, frozenset())
    generator = np.random.default_rng(0)
    texts = []
    for number in range(count):
        prompt = generator.integers(0, 256, 12).tolist()
        question = Question(sample_id=str(number), prompt_ids=prompt)
        texts.append((prompt, decoder.answer(question, contender=NONE, max_tokens=tokens).tokens))
    return texts


def trained(
    target: TargetModel,
    tables: Tables,
    shape: DraftShape,
    texts: list[Text],
    *,
    steps: int = 200,
    label_shift: int = 0,
) -> DFlashDrafter:
    """Overfit a drafter to some texts; with `label_shift`, slot k learns the token at k + shift."""
    ids = [np.array([*prompt, *answer], dtype=np.int64) for prompt, answer in texts]
    states = target.capture(ids, shape.taps, final=False)
    samples = []
    for number, ((prompt, _), row, state) in enumerate(zip(texts, ids, states, strict=True)):
        supervised = torch.arange(len(row)) >= len(prompt)
        samples.append(Sample(str(number), torch.from_numpy(row), supervised, state))
    drafter = DFlashDrafter(shape)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    objective = Objective(weights="uniform", kl_weight=0.0, streak_alpha=0.0)
    for step in range(steps):
        batch = pack(samples, shape, anchors=12, seed=0, epoch=step)
        if label_shift:
            batch = _shifted(batch, ids, shape.block_size, label_shift)
        optimizer.zero_grad(set_to_none=True)
        sums = block_step(drafter, tables, batch, objective)
        for parameter in drafter.parameters():
            if parameter.grad is not None:
                parameter.grad /= sums.weight
        optimizer.step()
    return drafter


def _shifted(batch: PackedBatch, ids: list[np.ndarray], size: int, shift: int) -> PackedBatch:
    blocks, slots = batch.rows // size, batch.rows % size
    documents, anchors = batch.layout.block_document[blocks], batch.layout.block_anchor[blocks]
    labels = [
        int(ids[document][min(anchor + slot + shift, len(ids[document]) - 1)])
        for document, anchor, slot in zip(documents.tolist(), anchors.tolist(), slots.tolist(), strict=True)
    ]
    return replace(batch, labels=torch.tensor(labels))
