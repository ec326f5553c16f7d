"""The fused head and loss: values and gradients of the naive one, without its memory."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from dflash.model.mask import compilations
from dflash.objective import fused_rows
from dflash.objective import head_loss as module
from dflash.objective.head_loss import Correction, Teacher, head_loss, plan_chunks

SIZE = 4


def problem(rows, width=16, vocabulary=700, lines=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lines = lines or rows

    def make(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    teacher_rows = torch.arange(rows) * lines // rows
    return (
        make(rows, width),
        make(vocabulary, width) * 0.5,
        torch.randint(0, vocabulary, (rows,), generator=generator),
        Teacher(make(lines, width), teacher_rows),
    )


def slots(rows):
    """Flat slots 1..B-1 of consecutive blocks."""
    return np.array([b * SIZE + k for b in range(rows) for k in range(1, SIZE)])[:rows]


def run(hidden, head, labels, teacher, rows_per_chunk=8, weigh=None, **settings):
    chunks = plan_chunks(slots(len(hidden)), teacher.rows.numpy(), SIZE, rows_per_chunk)
    weigh = weigh or (lambda chunk, correct, probability: torch.ones(len(correct)))
    return head_loss(hidden, head, labels, chunks, weigh, teacher=teacher, **settings)


def naive(hidden, head, labels, teacher, kl_weight, temperature):
    logits = hidden @ head.T
    cross = functional.cross_entropy(logits, labels, reduction="none")
    target = torch.log_softmax(teacher.states @ head.T / temperature, 1)[teacher.rows]
    draft = torch.log_softmax(logits / temperature, 1)
    divergence = (target.exp() * (target - draft)).sum(1)
    return cross, divergence, kl_weight * temperature**2 * divergence + (1 - kl_weight) * cross


@pytest.mark.parametrize("vocabulary", [700, 2048, 2500])
@pytest.mark.parametrize(("kl_weight", "temperature"), [(0.0, 1.0), (0.7, 1.0), (0.7, 2.0), (1.0, 0.5)])
def test_values_and_gradients_equal_the_naive_ones(vocabulary, kl_weight, temperature):
    hidden, head, labels, teacher = problem(50, vocabulary=vocabulary, lines=31)
    weights = torch.rand(50, generator=torch.Generator().manual_seed(9))
    found = run(
        hidden, head, labels, teacher,
        weigh=lambda chunk, correct, probability: weights[chunk.low : chunk.high],
        kl_weight=kl_weight, temperature=temperature,
    )  # fmt: skip
    hidden.requires_grad_(True)
    cross, divergence, loss = naive(hidden, head, labels, teacher, kl_weight, temperature)
    (loss * weights).sum().backward()
    torch.testing.assert_close(found.cross_entropy.double(), cross, rtol=1e-5, atol=1e-5)
    if kl_weight:
        torch.testing.assert_close(found.divergence.double(), divergence, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.gradient, hidden.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.probability.double(), (-cross).exp(), rtol=1e-4, atol=1e-7)
    assert torch.equal(found.correct, (hidden @ head.T).argmax(1) == labels)
    assert torch.equal(found.weight, weights)


@pytest.mark.parametrize(("kl_weight", "temperature"), [(0.0, 1.0), (0.7, 2.0)])
def test_what_a_gpu_compiles_gives_the_same(monkeypatch, kl_weight, temperature):
    hidden, head, labels, teacher = problem(50, vocabulary=2500, lines=31, dtype=torch.float32)
    settings = {"kl_weight": kl_weight, "temperature": temperature}
    tiled = run(hidden, head, labels, teacher, **settings)
    for rows_of in (fused_rows.rows_of, fused_rows.compiled()):
        monkeypatch.setattr(
            module, "_tiled_rows", lambda *given, f=rows_of, **more: _as_on_a_gpu(f, *given, **more)
        )
        found = run(hidden, head, labels, teacher, **settings)
        for field in ("cross_entropy", "divergence", "probability", "gradient"):
            torch.testing.assert_close(getattr(found, field), getattr(tiled, field), rtol=1e-4, atol=1e-5)
        assert torch.equal(found.correct, tiled.correct)


def test_chunks_of_many_lengths_are_compiled_a_few_times():
    hidden, head, labels, teacher = problem(64, vocabulary=700, lines=40, dtype=torch.float32)
    torch._dynamo.reset()
    traced = torch.compile(fused_rows.rows_of, backend="eager")
    before = compilations()
    for rows in (64, 50, 31, 17, 9, 40, 23):
        line = teacher.rows[:rows]
        teachers = teacher.states[: int(line.max()) + 1] @ head.T
        traced(hidden[:rows] @ head.T, labels[:rows], teachers, line, kl_weight=0.7, temperature=1.0)
    assert compilations() - before <= 3


def _as_on_a_gpu(rows_of, logits, labels, lines, head, *, scratch, **settings):
    taught, line = (None, None) if lines is None else (lines[0] @ head.t(), lines[1])
    return rows_of(logits, labels, taught, line, **settings)


def test_a_half_precision_gradient_is_close_to_the_exact_one():
    hidden, head, labels, teacher = problem(64, width=64, vocabulary=3000, lines=40, dtype=torch.bfloat16)
    found = run(hidden, head, labels, teacher, rows_per_chunk=32, kl_weight=0.7, temperature=2.0)
    exact = hidden.double().requires_grad_(True)
    _, _, loss = naive(exact, head.double(), labels, Teacher(teacher.states.double(), teacher.rows), 0.7, 2.0)
    loss.sum().backward()
    similarity = functional.cosine_similarity(found.gradient.double(), exact.grad, dim=1)
    assert similarity.min() > 0.999
    total = 0.7 * 4 * found.divergence + 0.3 * found.cross_entropy
    torch.testing.assert_close(total.double(), loss.detach(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 1000])
def test_the_size_of_chunks_changes_nothing(rows_per_chunk):
    hidden, head, labels, teacher = problem(40, lines=25)
    one = run(hidden, head, labels, teacher, 1000, kl_weight=0.5)
    other = run(hidden, head, labels, teacher, rows_per_chunk, kl_weight=0.5)
    torch.testing.assert_close(one.gradient, other.gradient)
    torch.testing.assert_close(one.divergence, other.divergence)


def test_weights_are_asked_for_with_whole_blocks():
    hidden, head, labels, teacher = problem(30)
    seen = []

    def weigh(chunk, correct, probability):
        seen.append((chunk.first, chunk.last, len(correct)))
        return torch.ones(len(correct))

    run(hidden, head, labels, teacher, 7, weigh, kl_weight=0.5)
    assert seen == [(first, first + 2, 6) for first in range(0, 10, 2)]


def test_each_position_of_the_teacher_goes_through_the_head_once_a_chunk(monkeypatch):
    hidden, head, labels, teacher = problem(60, lines=12)
    counted = []
    original = torch.mm

    def counting(a, b, **kwargs):
        if b.shape == head.T.shape:
            counted.append(len(a))
        return original(a, b, **kwargs)

    monkeypatch.setattr(torch, "mm", counting)
    run(hidden, head, labels, teacher, 1000, kl_weight=0.5)
    assert counted == [60, 12]
    counted.clear()
    run(hidden, head, labels, teacher, 1000, kl_weight=0.0)
    assert counted == [60]


def test_the_first_of_equal_maxima_is_the_choice():
    logits = torch.zeros(3, 4 * module._TILE + 5)
    logits[0, [1700, 40]] = 5.0
    logits[1, [4 * module._TILE + 2, 600]] = 5.0
    logits[2, 4 * module._TILE + 4] = 5.0
    top, winner = module._first_maximum(logits)
    assert winner.tolist() == [40, 600, 4 * module._TILE + 4]
    assert top.tolist() == [5.0] * 3


def test_a_low_rank_correction_has_the_gradients_of_autograd():
    hidden, head, labels, teacher = problem(24)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(24, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(700, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    found = run(
        hidden, head, labels, teacher,
        weigh=lambda chunk, correct, probability: torch.full((len(correct),), 0.5),
        kl_weight=0.3, correction=Correction(features.detach(), table.detach()),
    )  # fmt: skip
    hidden.requires_grad_(True)
    logits = hidden @ head.T + features @ table.T
    cross = functional.cross_entropy(logits, labels, reduction="none")
    target = torch.log_softmax(teacher.states @ head.T, 1)[teacher.rows]
    divergence = (target.exp() * (target - torch.log_softmax(logits, 1))).sum(1)
    (0.5 * (0.3 * divergence + 0.7 * cross)).sum().backward()
    torch.testing.assert_close(found.gradient, hidden.grad)
    torch.testing.assert_close(found.features_gradient, features.grad)
    torch.testing.assert_close(found.table_gradient.double(), table.grad, rtol=1e-5, atol=1e-6)


def test_distillation_without_final_states_is_refused():
    hidden, head, labels, _ = problem(4)
    with pytest.raises(ValueError, match="no final hidden state"):
        head_loss(hidden, head, labels, [], lambda *_: torch.ones(1), kl_weight=0.5)


def test_no_rows_make_no_losses():
    head = torch.randn(700, 16)
    found = head_loss(
        torch.zeros(0, 16), head, torch.zeros(0, dtype=torch.int64), [], lambda *_: torch.ones(0)
    )
    assert found.gradient.shape == (0, 16)
