"""The drafter computes what the published architecture says, in training and in decoding alike."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.model.drafter import DFlashDrafter, Rotary
from dflash.objective.batch import pack
from tests.support.tiny import draft_shape, random_sample, random_tables

S, F = "sliding_attention", "full_attention"
MIXES = [(F,), (S,), (S, F), (F, S), (F, F), (S, S, F)]


def shape_of(mix, window=6, **changes):
    return draft_shape(
        layers=len(mix), layer_types=mix, sliding_window=window if S in mix else None, **changes
    )


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * frequencies
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


def propose_slowly(drafter, inputs, taps, start):
    """One block in float64 from the words: everything at once, no cache, by published tensor names."""
    shape = drafter.shape
    w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    eps, width = shape.rms_norm_eps, shape.head_dim
    context = norm(taps.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = inputs.double()
    positions = torch.arange(start + shape.block_size)
    for i, kind in enumerate(shape.layer_types):
        at = f"layers.{i}."
        normed = norm(x, w[at + "input_layernorm.weight"], eps)
        q = (normed @ w[at + "self_attn.q_proj.weight"].T).view(-1, shape.heads, width)
        both = torch.cat([context, normed])
        k = (both @ w[at + "self_attn.k_proj.weight"].T).view(-1, shape.kv_heads, width)
        v = (both @ w[at + "self_attn.v_proj.weight"].T).view(-1, shape.kv_heads, width)
        q = rotate(norm(q, w[at + "self_attn.q_norm.weight"], eps), positions[start:], shape.rope_theta)
        k = rotate(norm(k, w[at + "self_attn.k_norm.weight"], eps), positions, shape.rope_theta)
        out = torch.zeros_like(q)
        for slot in range(shape.block_size):
            at_position = start + slot
            seen = [
                j
                for j in range(len(both))
                if kind == F or at_position - (shape.sliding_window - 1) <= j <= at_position
            ]
            for head in range(shape.heads):
                group = head // (shape.heads // shape.kv_heads)
                scores = k[seen, group] @ q[slot, head] / math.sqrt(width)
                out[slot, head] = torch.softmax(scores, 0) @ v[seen, group]
        x = x + out.flatten(1) @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(x, w[at + "post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ w[at + "mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], eps)


def a_drafter(shape, seed=0):
    """With weights large enough that attention and norms matter."""
    drafter = DFlashDrafter(shape, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(5.0) if parameter.ndim == 2 else parameter.normal_(1.0, 0.3, generator=generator)
    return drafter


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("start", [0, 3, 30])
def test_a_proposal_equals_the_architecture_written_slowly(mix, start):
    shape = shape_of(mix)
    drafter = a_drafter(shape)
    sample = random_sample(shape, 40, 0)
    inputs = random_tables(shape).embedding[torch.tensor([5, 262, 262, 262])]
    taps = sample.states.taps[:start]
    found = drafter.propose(inputs, taps, drafter.new_cache(), start)
    torch.testing.assert_close(
        found.double(), propose_slowly(drafter, inputs, taps, start), rtol=1e-4, atol=1e-4
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), mix=st.sampled_from(MIXES), window=st.integers(4, 40), seed=st.integers(0, 1000))
def test_training_equals_incremental_decoding_for_every_mix_of_layers(data, mix, window, seed):
    shape = shape_of(mix, window)
    drafter, tables = a_drafter(shape), random_tables(shape)
    samples = [
        random_sample(shape, n, 2, seed + n)
        for n in data.draw(st.lists(st.integers(4, 50), min_size=1, max_size=3))
    ]
    batch = pack(samples, shape, anchors=4, seed=seed, epoch=0)
    with torch.no_grad():
        inputs = tables.embedding[batch.tokens.flatten()]
        trained = drafter(batch.taps, inputs, batch.layout).unflatten(0, (-1, shape.block_size))
    for block in range(batch.blocks):
        document, anchor = int(batch.layout.block_document[block]), int(batch.layout.block_anchor[block])
        taps = samples[document].states.taps
        cuts = sorted({0, anchor, *data.draw(st.lists(st.integers(0, anchor), max_size=3))})
        cache = drafter.new_cache()
        proposed = drafter.propose(tables.embedding[batch.tokens[block]], taps[:0], cache, 0)
        for low, high in itertools.pairwise(cuts):
            proposed = drafter.propose(tables.embedding[batch.tokens[block]], taps[low:high], cache, high)
        torch.testing.assert_close(trained[block], proposed, rtol=1e-4, atol=1e-5)
        logits = trained[block] @ tables.head.T
        torch.testing.assert_close(logits, proposed @ tables.head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mix", MIXES)
def test_states_at_and_behind_an_anchor_do_not_change_its_block_by_one_bit(mix):
    shape = shape_of(mix, window=16, block_size=16)
    drafter, tables = a_drafter(shape), random_tables(shape)
    sample = random_sample(shape, 40, 5)
    supervised = torch.zeros(40, dtype=torch.bool)
    supervised[[10, 11, 14, 15, 30, 31]] = True
    sample = type(sample)(sample.sample_id, sample.ids, supervised, sample.states)
    batch = pack([sample], shape, anchors=9, seed=0, epoch=0)
    assert batch.layout.block_anchor.tolist() == [10, 14, 30]
    inputs = tables.embedding[batch.tokens.flatten()]
    with torch.no_grad():
        before = drafter(batch.taps, inputs, batch.layout).unflatten(0, (3, 16))
        for block, anchor in enumerate([10, 14, 30]):
            taps = batch.taps.clone()
            taps[anchor:] += 7.0
            after = drafter(taps, inputs, batch.layout).unflatten(0, (3, 16))
            assert torch.equal(before[block], after[block])
        taps = batch.taps.clone()
        taps[9] += 7.0
        after = drafter(taps, inputs, batch.layout).unflatten(0, (3, 16))
        assert not torch.equal(before[0], after[0])


def test_context_must_be_given_exactly_once():
    shape = draft_shape()
    drafter, cache = DFlashDrafter(shape), None
    cache = drafter.new_cache()
    taps, inputs = torch.zeros(5, shape.tap_width), torch.zeros(4, shape.hidden_size)
    drafter.propose(inputs, taps, cache, 5)
    assert cache.length == 5
    with pytest.raises(ValueError, match="exactly once"):
        drafter.propose(inputs, taps, cache, 5)


class TestRotary:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_frequencies_stay_fp32_whatever_the_model_is_cast_to(self, dtype):
        shape = draft_shape()
        drafter = DFlashDrafter(shape).to(dtype)
        rotary = drafter._rotary(torch.tensor([3000]))
        assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
        torch.testing.assert_close(rotary.cos, DFlashDrafter(shape)._rotary(torch.tensor([3000])).cos)
        assert not any("freq" in name or "rotary" in name for name in drafter.state_dict())

    @pytest.mark.parametrize(("limit", "tolerance"), [(8192, 1e-3), (262_144, 3e-2)])
    @pytest.mark.parametrize("theta", [1e4, 1e7])
    def test_long_positions_agree_with_float64(self, limit, tolerance, theta):
        positions = torch.tensor([1, 1000, limit // 2 + 1, limit - 1])
        x = torch.randn(4, 2, 128, generator=torch.Generator().manual_seed(0))
        found = Rotary.at(positions, 128, theta).turn(x)
        torch.testing.assert_close(
            found.double(), rotate(x.double(), positions, theta), rtol=0, atol=tolerance
        )

    def test_the_whole_drafter_agrees_with_float64_far_into_the_context(self):
        shape = draft_shape(sliding_window=16, layer_types=(S, F), max_positions=4096)
        drafter = a_drafter(shape)
        taps = torch.randn(4000, shape.tap_width, generator=torch.Generator().manual_seed(0))
        inputs = random_tables(shape).embedding[:4]
        found = drafter.propose(inputs, taps, drafter.new_cache(), 4000)
        expected = propose_slowly(drafter, inputs, taps, 4000)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-3)


def test_masters_in_fp32_compute_in_the_dtype_of_the_inputs():
    shape = draft_shape()
    drafter = DFlashDrafter(shape)
    sample = random_sample(shape, 12, 3)
    inputs = random_tables(shape).embedding[:4].bfloat16()
    found = drafter.propose(inputs, sample.states.taps[:8], drafter.new_cache(), 8)
    assert found.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
    cast = DFlashDrafter(shape).to(torch.bfloat16)
    same = cast.propose(inputs, sample.states.taps[:8], cast.new_cache(), 8)
    assert torch.equal(found, same)


def test_the_seed_fixes_the_weights():
    one, same, other = (DFlashDrafter(draft_shape(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert 0.019 < one.fc.weight.std() < 0.021
    assert torch.equal(one.norm.weight, torch.ones(64))
