"""Speculative decoding emits what plain decoding emits, whatever the drafter proposes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash.errors import ConfigurationError
from dflash.evaluation.answers import Question
from dflash.evaluation.equality import Scores, compare
from dflash.evaluation.replay import GreedyAnswer, replay
from dflash.evaluation.speculative import Decoder, Sampler
from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape, resolve_shape
from dflash.model.target import Tables, TargetModel, load_tables, load_target
from dflash.resource.model import DraftModel
from tests.support.tiny import save_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetModel:
    return load_target(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def tables(folder: Path) -> Tables:
    return load_tables(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def shape(target: TargetModel) -> DraftShape:
    model = DraftModel(layers=2, block_size=8, sliding_window=16, taps=[0, 1, 3], mask_token_id=300)
    return resolve_shape(model, target.facts)


def questions(count: int, seed: int = 0) -> list[Question]:
    generator = np.random.default_rng(seed)
    return [
        Question(
            sample_id=f"q{i}", prompt_ids=generator.integers(0, 256, int(generator.integers(1, 40))).tolist()
        )
        for i in range(count)
    ]


class Oracle(DFlashDrafter):
    """A drafter that knows the answer and errs where it is told to: every acceptance length occurs."""

    def __init__(
        self, shape: DraftShape, tables: Tables, answer: list[int], prompt: int, errors: float
    ) -> None:
        super().__init__(shape)
        self.known, self.prompt, self.tables = answer, prompt, tables
        self.errors = np.random.default_rng(0).random(10_000) < errors
        self.seen: list[int] = []

    def propose(self, inputs, new_taps, cache, start):  # type: ignore[no-untyped-def]
        super().propose(inputs, new_taps, cache, start)  # checks that taps come exactly once
        self.seen.append(start)
        at = start - self.prompt + 1
        wanted = [*self.known[at : at + 7], *[0] * 8][:7]
        wrong = [(t + 1) % 256 if self.errors[start * 8 + k] else t for k, t in enumerate(wanted)]
        return _states_for([0, *wrong], self.tables)


def _states_for(tokens: list[int], tables: Tables) -> torch.Tensor:
    """States that the head maps to these tokens, as nearly as its rank allows."""
    inverse = torch.linalg.pinv(tables.head.double())
    return (torch.nn.functional.one_hot(torch.tensor(tokens), len(tables.head)).double() @ inverse.T).float()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("errors", [0.0, 0.2, 1.0])
def test_outputs_are_equal_for_good_mixed_and_useless_drafts(
    target: TargetModel, tables: Tables, shape: DraftShape, temperature: float, errors: float
) -> None:
    lengths = set()
    for question in questions(4):
        plain = Decoder(target, tables, None, frozenset([258])).answer(
            question, contender="none", max_tokens=60, temperature=temperature
        )
        oracle = Oracle(shape, tables, plain.tokens, len(question.prompt_ids), errors)
        drafted = Decoder(target, tables, oracle, frozenset([258])).answer(
            question, contender="dflash", max_tokens=60, temperature=temperature
        )
        assert drafted.tokens == plain.tokens
        assert drafted.finish_reason == plain.finish_reason
        for answer in (plain, drafted):
            answer.check()
        lengths |= set(drafted.emitted)
        if errors == 0.0:
            assert np.mean(drafted.emitted[:-1]) > 7
        if errors == 1.0:
            assert set(drafted.emitted) == {1}
    assert len(lengths) >= (4 if errors == 0.2 else 1)


def test_a_real_drafters_outputs_are_equal(target: TargetModel, tables: Tables, shape: DraftShape) -> None:
    decoder = Decoder(target, tables, DFlashDrafter(shape), frozenset([258]))
    for question in questions(6, seed=3):
        plain = decoder.answer(question, contender="none", max_tokens=40)
        drafted = decoder.answer(question, contender="dflash", max_tokens=40)
        assert drafted.tokens == plain.tokens


def test_an_answer_ends_at_the_contexts_end(folder: Path, tables: Tables, shape: DraftShape) -> None:
    target = load_target(str(folder), dtype="float32")
    object.__setattr__(target.facts, "max_positions", 64)
    decoder = Decoder(target, tables, DFlashDrafter(shape), frozenset())
    long = Question(sample_id="long", prompt_ids=[5] * 60)
    assert len(decoder.answer(long, contender="dflash", max_tokens=50).tokens) == 4
    with pytest.raises(ConfigurationError, match="prompt full: 64 tokens leave no room"):
        decoder.answer(Question(sample_id="full", prompt_ids=[5] * 64), contender="none", max_tokens=9)


@pytest.mark.parametrize("errors", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("ends", [True, False])
def test_a_replayed_answer_is_counted_as_the_decoder_counts(
    target: TargetModel, tables: Tables, shape: DraftShape, errors: float, ends: bool
) -> None:
    for question in questions(4):
        known = Decoder(target, tables, None, frozenset()).answer(question, contender="none", max_tokens=40)
        stops = frozenset(known.tokens[25:26] if ends else [])
        plain = Decoder(target, tables, None, stops).answer(question, contender="none", max_tokens=40)
        oracle = Oracle(shape, tables, known.tokens, len(question.prompt_ids), errors)
        drafted = Decoder(target, tables, oracle, stops).answer(question, contender="dflash", max_tokens=40)
        ids = np.array([*question.prompt_ids, *plain.tokens])
        taps = target.capture([ids], shape.taps, final=False)[0].taps
        replayed = replay(oracle, tables, GreedyAnswer(question, plain.tokens, 40, taps))
        replayed.check()
        assert (replayed.accepted, replayed.emitted) == (drafted.accepted, drafted.emitted)
        assert replayed.finish_reason == drafted.finish_reason


def test_a_real_drafter_accepts_the_same_in_a_replay(
    target: TargetModel, tables: Tables, shape: DraftShape
) -> None:
    drafter = DFlashDrafter(shape)
    decoder = Decoder(target, tables, drafter, frozenset([258]))
    for question in questions(6, seed=3):
        drafted = decoder.answer(question, contender="dflash", max_tokens=40)
        ids = np.array([*question.prompt_ids, *drafted.tokens])
        taps = target.capture([ids], shape.taps, final=False)[0].taps
        replayed = replay(drafter, tables, GreedyAnswer(question, drafted.tokens, 40, taps))
        assert (replayed.accepted, replayed.emitted) == (drafted.accepted, drafted.emitted)


def test_a_hybrid_target_decodes_in_process_but_refuses_to_speculate(tmp_path: Path) -> None:
    hybrid = save_tiny_target(tmp_path, "qwen3_5")
    target = load_target(str(hybrid), dtype="float32")
    model = DraftModel(layers=1, block_size=4, sliding_window=None, taps=[0, 1], mask_token_id=300)
    drafter = DFlashDrafter(resolve_shape(model, target.facts))
    decoder = Decoder(target, load_tables(str(hybrid), dtype="float32"), drafter, frozenset())
    assert len(decoder.answer(questions(1)[0], contender="none", max_tokens=4).tokens) == 4
    with pytest.raises(ConfigurationError, match="set engine: sglang"):
        decoder.answer(questions(1)[0], contender="dflash", max_tokens=4)


def test_sampling_draws_from_the_targets_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]])
    counts = np.zeros(4)
    draws = 4000
    for position in range(draws):
        counts[Sampler(0.7, 1, torch.device("cpu")).choose(logits, position)[0]] += 1
    expected = torch.softmax(logits[0] / 0.7, dim=-1).numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3 degrees, 0.1 %


def test_a_difference_is_a_near_tie_or_a_divergence_by_the_targets_logits() -> None:
    logits = [20.0, 19.9375, 3.0, 19.0]

    def judged(other: int, dtype: str):  # type: ignore[no-untyped-def]
        return compare(
            sample_id="q", contender="dflash", prompt=[1], plain=[7, 0, 5], other=[7, other, 5], dtype=dtype,
            scores=lambda text, a, b: Scores(logits[a], logits[b], max(logits)) if text == [1, 7] else None,
        )  # fmt: skip

    tie = judged(1, "bfloat16")
    assert (tie.kind, tie.position, tie.margin, tie.steps) == ("near_tie", 1, 0.0625, 0.5)
    assert judged(1, "float32").kind == "divergence"
    assert judged(3, "bfloat16").kind == "divergence"
    assert judged(0, "bfloat16") is None


def test_two_poor_tokens_with_like_logits_are_no_tie() -> None:
    found = compare(
        sample_id="q", contender="dflash", prompt=[1], plain=[7], other=[8], dtype="bfloat16",
        scores=lambda *_: Scores(3.0, 3.0, 20.0),
    )  # fmt: skip
    assert found is not None
    assert found.kind == "divergence"


def test_an_answer_that_ends_early_is_a_divergence() -> None:
    found = compare(
        sample_id="q", contender="dflash", prompt=[1], plain=[7, 8], other=[7], dtype="bfloat16",
        scores=lambda *_: Scores(0.0, 0.0, 0.0),
    )  # fmt: skip
    assert found is not None
    assert (found.kind, found.plain_token, found.other_token, found.steps) == ("divergence", 8, -1, None)


@pytest.mark.soak
def test_every_prompt_length_over_a_page_is_lossless(
    target: TargetModel, tables: Tables, shape: DraftShape
) -> None:
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 256, 300).tolist()
    for length in range(60, 190):
        question = Question(sample_id=str(length), prompt_ids=ids[:length])
        plain = Decoder(target, tables, None, frozenset()).answer(question, contender="none", max_tokens=24)
        oracle = Oracle(shape, tables, plain.tokens, length, 0.3)
        drafted = Decoder(target, tables, oracle, frozenset()).answer(
            question, contender="dflash", max_tokens=24
        )
        assert drafted.tokens == plain.tokens, f"at {length} prompt tokens"
