"""One flat AdamW: the same updates as torch's on normalised gradients, and no update on bad ones."""

import pytest
import torch
from torch import nn

from dflash.resource.training import Training
from dflash.training.optimizer import FlatOptimizer

TRAINING = Training(weight_decay=0.1, clip=0.5, betas=(0.8, 0.9))


def make_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5, bias=False), nn.Linear(5, 3))


def make_optimizer(module: nn.Module, dtype: torch.dtype = torch.float32) -> FlatOptimizer:
    return FlatOptimizer(module, TRAINING, sums=2, dtype=dtype)


def backward(module: nn.Module, seed: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 6, generator=generator, dtype=next(module.parameters()).dtype)
    (module(x).square().sum() * weight).backward()


def test_a_step_equals_torch_adamw_on_the_normalised_clipped_gradient() -> None:
    module, reference = make_module(), make_module()
    optimizer = make_optimizer(module)
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
    )
    for step in range(5):
        optimizer.zero()
        backward(module, 2 * step, 3.0)
        backward(module, 2 * step + 1, 3.0)  # accumulated without normalising
        norm, skipped = optimizer.step(0.01, torch.tensor(42.0))
        adam.zero_grad()
        backward(reference, 2 * step, 3.0 / 42.0)
        backward(reference, 2 * step + 1, 3.0 / 42.0)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        adam.step()
        assert not skipped
        torch.testing.assert_close(norm, expected)
        for got, want in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    module = make_module()
    optimizer = make_optimizer(module)
    for step in range(2):
        optimizer.zero()
        backward(module, step, 1.0)
        optimizer.step(0.01, torch.tensor(1.0))
    before = [tensor.clone() for tensor in optimizer.state_tensors()]
    optimizer.zero()
    backward(module, 9, 1.0)
    optimizer.gradient[4] = bad
    _, skipped = optimizer.step(0.01, torch.tensor(1.0))
    assert skipped
    for got, want in zip(optimizer.state_tensors(), before, strict=True):
        assert torch.equal(got, want)
    optimizer.zero()
    backward(module, 10, 1.0)
    _, skipped = optimizer.step(0.01, torch.tensor(1.0))
    assert not skipped
    assert all(torch.isfinite(tensor).all() for tensor in optimizer.state_tensors())


@pytest.mark.parametrize("weight_sum", [0.0, float("nan"), float("inf")])
def test_a_step_without_weight_changes_nothing(weight_sum: float) -> None:
    module = make_module()
    optimizer = make_optimizer(module)
    before = optimizer.masters.clone()
    optimizer.zero()
    _, skipped = optimizer.step(0.01, torch.tensor(weight_sum))
    assert skipped
    assert torch.equal(optimizer.masters, before)


def test_masters_keep_what_bf16_parameters_cannot() -> None:
    module = make_module()
    optimizer = make_optimizer(module, torch.bfloat16)
    before = optimizer.masters.clone()
    for step in range(20):
        optimizer.zero()
        backward(module, step, 1.0)
        optimizer.step(1e-6, torch.tensor(1.0))
    assert all(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    moved = (optimizer.masters - before).abs()
    assert 0 < moved.max() < 1e-4


def test_buffers_keep_their_precision() -> None:
    module = make_module()
    module.register_buffer("frequencies", torch.rand(4))
    make_optimizer(module, torch.bfloat16)
    assert module.get_buffer("frequencies").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_restored_it_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    module = make_module()
    optimizer = make_optimizer(module, dtype)

    def train(module: nn.Module, optimizer: FlatOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero()
            backward(module, step, 1.0)
            optimizer.step(0.01, torch.tensor(2.0))

    train(module, optimizer, range(3))
    weights, moments = optimizer.weights_on_host(), optimizer.moments_on_host()
    train(module, optimizer, range(3, 6))

    again = make_module(seed=1)
    resumed = make_optimizer(again, dtype)
    resumed.restore(weights, moments)
    train(again, resumed, range(3, 6))
    assert torch.equal(resumed.masters, optimizer.masters)
    for got, want in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(got, want)


def test_weights_of_another_shape_are_refused() -> None:
    optimizer = make_optimizer(make_module())
    weights, moments = optimizer.weights_on_host(), optimizer.moments_on_host()
    weights["1.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"1\.weight has shape \[2, 2\], not \[5, 6\]"):
        optimizer.restore(weights, moments)
