"""One training step: the whole of it against float64 loops, and what must hold around it."""

import dataclasses

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.model.drafter import DFlashDrafter
from dflash.model.mask import TiledAttention
from dflash.objective.batch import pack
from dflash.objective.step import StepSums, block_step, with_noise
from dflash.objective.weights import Objective
from tests.support.naive_objective import naive_loss
from tests.support.tiny import draft_shape, random_sample, random_tables

SHAPE = draft_shape()
OBJECTIVES = [
    Objective(gamma=3.0, kl_weight=0.0, streak_alpha=0.0),
    Objective(gamma=3.0, kl_weight=0.7, kl_temperature=2.0, streak_alpha=0.5),
    Objective(weights="dpace", kl_weight=0.7, kl_temperature=1.0, streak_alpha=0.0),
    Objective(weights="uniform", kl_weight=1.0, kl_temperature=0.5, streak_alpha=2.0),
]


def samples(count=3, dtype=torch.float32):
    return [random_sample(SHAPE, 14 + 9 * n, 4 + n, n, dtype) for n in range(count)]


def packed(parts, epoch=0):
    return pack(parts, SHAPE, anchors=5, seed=0, epoch=epoch)


def gradients(drafter):
    return torch.cat([parameter.grad.flatten().double() for parameter in drafter.parameters()])


def naive_step(drafter, tables, batch, objective):
    """Gradients and sums by full logits and loops, in the dtype of everything given."""
    inputs = functional.embedding(batch.tokens.flatten(), tables.embedding)
    size = SHAPE.block_size
    hidden = drafter(batch.taps, inputs, batch.layout).unflatten(0, (-1, size))
    labels = [[0] * size for _ in range(len(hidden))]
    teacher = [[None] * size for _ in range(len(hidden))]
    valid = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    for row, label, line in zip(batch.rows.tolist(), batch.labels.tolist(), batch.teacher_rows, strict=True):
        n, k = divmod(row, size)
        labels[n][k], teacher[n][k], valid[n, k] = label, batch.teacher[line].double(), True
    total, weights, correct, parts = naive_loss(hidden, tables.head, labels, teacher, valid, objective)
    total.backward()
    return total.detach(), weights, correct, valid, parts


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_equals_loops_in_float64_in_sums_and_every_gradient(objective):
    tables = random_tables(SHAPE, dtype=torch.float64)
    tables = dataclasses.replace(tables, head=tables.head * 3)
    fast, slow = DFlashDrafter(SHAPE).double(), DFlashDrafter(SHAPE).double()
    batch = packed(samples(dtype=torch.float64))
    sums = block_step(fast, tables, batch, objective)
    total, weights, correct, valid, (cross, divergence) = naive_step(slow, tables, batch, objective)
    torch.testing.assert_close(sums.loss.double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.weight.double(), weights.sum(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.cross_entropy.double(), cross, rtol=1e-5, atol=1e-5)
    if objective.kl_weight:
        torch.testing.assert_close(sums.divergence.double(), divergence, rtol=1e-5, atol=1e-5)
    assert torch.equal(sums.counts.long(), valid.sum(0))
    assert torch.equal(sums.correct.long(), correct.sum(0))
    prefix = correct[:, 1:].long().cumprod(1).sum(1)
    assert sums.acceptance == (1 + prefix).sum()
    assert sums.blocks == len(valid) == batch.blocks
    assert sums.nonfinite == 0
    torch.testing.assert_close(gradients(fast), gradients(slow), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_and_gradients_are_the_same_however_samples_are_spread(objective, ranks):
    tables, parts = random_tables(SHAPE), samples(6)
    whole, spread = DFlashDrafter(SHAPE), DFlashDrafter(SHAPE)
    all_at_once = block_step(whole, tables, packed(parts), objective, noise_std=0.1)
    sums = [
        block_step(spread, tables, packed(parts[rank::ranks]), objective, noise_std=0.1)
        for rank in range(ranks)
    ]
    total = sums[0]
    for more in sums[1:]:
        total = total + more
    torch.testing.assert_close(total.flatten(), all_at_once.flatten(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        gradients(spread) / total.weight, gradients(whole) / all_at_once.weight, rtol=1e-3, atol=1e-6
    )


def test_a_batch_without_an_anchor_is_a_true_zero_that_leaves_a_gradient_everywhere():
    drafter = DFlashDrafter(SHAPE)
    none = packed([random_sample(SHAPE, 6, 6), random_sample(SHAPE, 6, 5, 1)])
    sums = block_step(drafter, random_tables(SHAPE), none, OBJECTIVES[1], noise_std=0.1)
    assert torch.equal(sums.flatten(), torch.zeros_like(sums.flatten()))
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_sample_without_an_anchor_changes_nothing_for_its_neighbours():
    tables, parts = random_tables(SHAPE), samples(2)
    without, with_one = DFlashDrafter(SHAPE), DFlashDrafter(SHAPE)
    block_step(without, tables, packed(parts), OBJECTIVES[1])
    block_step(with_one, tables, packed([parts[0], random_sample(SHAPE, 6, 6, 9), parts[1]]), OBJECTIVES[1])
    torch.testing.assert_close(gradients(without), gradients(with_one))


def test_a_gradient_that_is_not_finite_is_told():
    drafter = DFlashDrafter(SHAPE)
    with torch.no_grad():
        drafter.fc.weight[3, 5] = torch.inf
    assert block_step(drafter, random_tables(SHAPE), packed(samples()), OBJECTIVES[0]).nonfinite == 1


def test_half_precision_follows_full_precision_with_fp32_masters():
    exact, half = DFlashDrafter(SHAPE), DFlashDrafter(SHAPE)
    parts = samples(4)
    of_exact = block_step(exact, random_tables(SHAPE), packed(parts), OBJECTIVES[1])
    of_half = block_step(half, random_tables(SHAPE, dtype=torch.bfloat16), packed(parts), OBJECTIVES[1])
    assert all(parameter.grad.dtype == torch.float32 for parameter in half.parameters())
    torch.testing.assert_close(
        of_half.loss / of_half.weight, of_exact.loss / of_exact.weight, rtol=0.02, atol=0
    )
    assert functional.cosine_similarity(gradients(exact), gradients(half), dim=0) > 0.99


class TestNoise:
    def test_its_std_is_relative_to_each_taps_rms_at_each_token(self):
        taps = torch.ones(400, 2 * 64)
        taps[:, 64:] = 10.0
        taps[200:] *= 3.0
        noise = with_noise(taps, 0.1, (7,), (400,), 2) - taps
        for rows, scale in ((slice(0, 200), 1.0), (slice(200, 400), 3.0)):
            assert abs(noise[rows, :64].std() - 0.1 * scale) < 0.005 * scale
            assert abs(noise[rows, 64:].std() - 1.0 * scale) < 0.05 * scale
        assert abs(noise[:200, :64].mean()) < 0.005

    def test_a_sample_has_the_same_noise_in_any_company_and_another_in_another_epoch(self):
        one, other = samples(2)
        alone, together = packed([other]), packed([one, other])
        noisy = with_noise(alone.taps, 0.1, alone.noise_seeds, alone.context_lengths, 2)
        both = with_noise(together.taps, 0.1, together.noise_seeds, together.context_lengths, 2)
        assert torch.equal(noisy, both[together.context_lengths[0] :])
        assert packed([other], epoch=1).noise_seeds != alone.noise_seeds


class _Waits(TorchDispatchMode):
    """Fails on every operation that would make a host wait for its device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_never_waits_for_the_device(objective, monkeypatch):
    drafter, tables, batch = DFlashDrafter(SHAPE), random_tables(SHAPE), packed(samples())
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(f"{name} waits"))
    with _Waits():
        first = block_step(drafter, tables, batch, objective, noise_std=0.1)
        (first + first).flatten()


def test_the_mask_is_built_once_a_step_and_shared_by_layers_of_a_kind(monkeypatch):
    built = []
    original = TiledAttention.__init__
    monkeypatch.setattr(
        TiledAttention, "__init__", lambda self, *a: (built.append(a[1]), original(self, *a))[1]
    )
    kinds = ("sliding_attention",) * 3 + ("full_attention",) * 2
    shape = draft_shape(layers=5, layer_types=kinds)
    block_step(DFlashDrafter(shape), random_tables(shape), packed(samples()), OBJECTIVES[1])
    assert sorted(built, key=str) == [16, None]


def test_sums_survive_a_transfer_in_one_vector():
    sums = block_step(DFlashDrafter(SHAPE), random_tables(SHAPE), packed(samples()), OBJECTIVES[1])
    again = StepSums.unflatten(sums.flatten(), SHAPE.block_size)
    for field in dataclasses.fields(StepSums):
        one, other = getattr(sums, field.name), getattr(again, field.name)
        assert one.shape == other.shape
        assert torch.equal(one, other)


def train(shape, tables, parts, objective, steps, rate=3e-3):
    drafter = DFlashDrafter(shape)
    optimizer = torch.optim.Adam(drafter.parameters(), rate)
    for step in range(steps):
        optimizer.zero_grad()
        sums = block_step(drafter, tables, pack(parts, shape, anchors=16, seed=0, epoch=step), objective)
        for parameter in drafter.parameters():
            parameter.grad /= sums.weight
        optimizer.step()
    return drafter, sums


def test_an_overfit_drafter_proposes_whole_blocks_in_a_plain_decoding_loop():
    tables = random_tables(SHAPE)
    sample = random_sample(SHAPE, 48, 8, 3)
    drafter, sums = train(SHAPE, tables, [sample], Objective(gamma=4.0, kl_weight=0.0), 150)
    assert sums.correct.sum() / sums.counts.sum() > 0.95
    cache, start, rounds, known = drafter.new_cache(), 8, 0, 0
    masks = tables.embedding[torch.full((SHAPE.block_size - 1,), SHAPE.mask_token_id)]
    while start < 47:
        inputs = torch.cat([tables.embedding[sample.ids[start]][None], masks])
        states = drafter.propose(inputs, sample.states.taps[known:start], cache, start)
        proposed = drafter.choose(states, int(sample.ids[start]), tables.embedding, tables.head).tolist()
        true = sample.ids[start + 1 : start + SHAPE.block_size].tolist()
        hits = next((i for i, (a, b) in enumerate(zip(proposed, true, strict=False)) if a != b), len(true))
        known, start, rounds = start, start + hits + 1, rounds + 1
    assert 39 / rounds > 0.9 * SHAPE.block_size


class TestDominoHead:
    SHAPE = draft_shape(head="domino", head_state=48, head_rank=32)

    def data(self):
        """Text in which a token depends on the one before it, which no single slot can know."""
        generator = torch.Generator().manual_seed(0)
        table = torch.randint(0, 24, (24,), generator=generator)
        parts = []
        for number in range(4):
            sample = random_sample(SHAPE, 60, 6, number)
            ids = torch.randint(0, 24, (60,), generator=generator)
            for position in range(1, 60):
                if torch.rand((), generator=generator) < 0.75:
                    ids[position] = table[ids[position - 1]]
            parts.append(dataclasses.replace(sample, ids=ids))
        return parts

    def test_it_learns_what_the_plain_head_cannot(self):
        tables, parts = random_tables(SHAPE), self.data()
        objective = Objective(gamma=4.0, kl_weight=0.0, streak_alpha=0.0)
        _, plain = train(SHAPE, tables, parts, objective, 40)
        _, domino = train(self.SHAPE, tables, parts, objective, 40)
        assert domino.loss / domino.weight < 0.9 * plain.loss / plain.weight

    def test_its_gradients_equal_finite_differences(self):
        shape, tables = self.SHAPE, random_tables(SHAPE, dtype=torch.float64)
        drafter = DFlashDrafter(shape).double()
        batch = pack(samples(2, torch.float64), shape, anchors=4, seed=0, epoch=0)
        objective = Objective(weights="uniform", kl_weight=0.3, kl_temperature=2.0, streak_alpha=0.0)
        block_step(drafter, tables, batch, objective)
        generator = torch.Generator().manual_seed(1)
        for name in ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight",
                     "embed_proj.2.weight", "fc.weight"):  # fmt: skip
            parameter = drafter.get_parameter(name)
            direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            expected = (parameter.grad * direction).sum()
            losses = []
            for sign in (1, -1):
                moved = DFlashDrafter(shape).double()
                moved.load_state_dict(drafter.state_dict())
                with torch.no_grad():
                    moved.get_parameter(name).add_(direction, alpha=sign * 1e-3)
                losses.append(block_step(moved, tables, batch, objective).loss.double())
            found = (losses[0] - losses[1]) / 2e-3
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=0.05)

    def test_decoding_corrects_each_slot_by_what_was_proposed_before_it(self):
        tables = random_tables(SHAPE)
        drafter, _ = train(self.SHAPE, tables, self.data(), Objective(kl_weight=0.0), 30)
        states = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
        tokens = [5]
        for slot in range(1, 4):
            logits = tables.head @ states[slot]
            if slot >= 2:
                gru, _ = drafter.prefix_gru(tables.embedding[tokens][None])
                logits = logits + drafter.embed_proj(torch.cat([states[slot], gru[0, -1]]))
            tokens.append(int(logits.argmax()))
        assert drafter.choose(states, 5, tables.embedding, tables.head).tolist() == tokens[1:]
