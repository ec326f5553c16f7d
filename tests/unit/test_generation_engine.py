"""The in-process engine: company in a batch, slots used again and lengths of all kinds change no answer."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from dflash.engines.engine import Completion, Request, RequestRefusedError, sample_seed
from dflash.engines.sampling import choose, uniforms
from dflash.engines.transformers import TransformersEngine
from dflash.model.facts import TargetFacts
from dflash.resource.generation import Sampling
from dflash.resource.target import Target
from tests.support.tiny import tiny_target

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 256, n).astype(np.int32) for n in (1, 3, 50, 7, 300, 20, 2, 64, 33, 5, 128, 9)]


def generate(
    folder: Path, prompts: list[np.ndarray], *, temperature: float, slots: int, tokens: int = 24
) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        engine = TransformersEngine(
            Target(model=str(folder), dtype="float32"), Sampling(temperature=temperature), slots
        )
        await engine.start()
        try:
            return await asyncio.gather(
                *[
                    engine.generate(Request(str(n), ids, tokens + n, sample_seed(0, str(n))))
                    for n, ids in enumerate(prompts)
                ]
            )
        finally:
            await engine.close()

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_greedy_answers_equal_those_of_single_generation(family: str) -> None:
    folder = tiny_target(family)  # type: ignore[arg-type]
    factory = getattr(transformers, TargetFacts.from_folder(folder).architecture)
    model = factory.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = PROMPTS[:4] if family == "qwen3_5" else PROMPTS
    answers = generate(folder, prompts, temperature=0.0, slots=5)
    for number, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        alone = model.generate(
            torch.from_numpy(ids[None].astype(np.int64)),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=24 + number,
            do_sample=False,
        )
        assert answer.output_ids.tolist() == alone[0, len(ids) :].tolist()
        ended = int(answer.output_ids[-1]) == 258
        assert answer.finish_reason == ("stop" if ended else "length")


def test_a_sampled_answer_depends_on_its_own_seed_alone() -> None:
    folder = tiny_target("llama")
    together = generate(folder, PROMPTS, temperature=1.0, slots=8)
    few = generate(folder, PROMPTS, temperature=1.0, slots=2)
    for one, other in zip(together, few, strict=True):
        assert one.output_ids.tolist() == other.output_ids.tolist()
    same_prompt = generate(folder, [PROMPTS[2]] * 4, temperature=1.0, slots=4)
    assert len({tuple(answer.output_ids[:10].tolist()) for answer in same_prompt}) == 4


def test_a_prompt_outside_the_vocabulary_is_refused_and_others_are_answered() -> None:
    folder = tiny_target("llama")
    with pytest.raises(RequestRefusedError, match="outside the vocabulary"):
        generate(folder, [np.array([5, 10_000], np.int32)], temperature=0.0, slots=2)


def test_draws_follow_the_distribution_within_top_k_and_top_p() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    logits = probabilities.log().repeat(20_000, 1)
    seeds = np.arange(20_000)

    def shares(sampling: Sampling) -> list[float]:
        chosen = choose(logits, sampling, seeds, np.zeros(20_000, np.int64))
        return (np.bincount(chosen, minlength=5) / 20_000).tolist()

    full = shares(Sampling(temperature=1.0, top_p=1.0, top_k=-1))
    assert full == pytest.approx(probabilities.tolist(), abs=0.015)
    assert shares(Sampling(temperature=1.0, top_p=1.0, top_k=2))[2:] == [0.0, 0.0, 0.0]
    nucleus = shares(Sampling(temperature=1.0, top_p=0.8, top_k=-1))
    assert nucleus[3:] == [0.0, 0.0]
    assert nucleus[0] == pytest.approx(0.5 / 0.85, abs=0.015)
    cold = shares(Sampling(temperature=0.5, top_p=1.0, top_k=-1))
    assert cold[0] == pytest.approx(0.25 / (0.25 + 0.04 + 0.0225 + 0.01 + 0.0025), abs=0.015)
    assert shares(Sampling(temperature=0.0)) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_random_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    by_seed = uniforms(np.arange(10_000), np.zeros(10_000, np.int64))
    by_position = uniforms(np.full(10_000, 7), np.arange(10_000))
    for draws in (by_seed, by_position):
        assert 0.0 <= draws.min() < 0.01
        assert 0.99 < draws.max() < 1.0
        assert abs(draws.mean() - 0.5) < 0.01
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
