"""A target's parameters, FLOPs and bytes follow from config.json, for each family of layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dflash.model.facts import TargetFacts
from dflash.planning.target_cost import target_cost
from tests.support.planning import QWEN3_8B, QWEN36_27B
from tests.support.tiny import FAMILIES, Family, tiny_target


def test_a_dense_target_has_its_published_size_and_cache() -> None:
    cost = target_cost(TargetFacts.from_config(QWEN3_8B))
    assert abs(cost.parameters / 8.19e9 - 1) < 0.005  # Qwen3-8B's card: 8.2 B parameters
    assert cost.cache_bytes_per_token == 36 * 2 * 2 * 8 * 128


def test_a_hybrid_target_keeps_keys_only_in_its_full_layers() -> None:
    cost = target_cost(TargetFacts.from_config(QWEN36_27B))
    assert abs(cost.parameters / 27e9 - 1) < 0.02
    assert cost.cache_bytes_per_token == 16 * 2 * 2 * 4 * 256
    assert cost.state_bytes_per_sequence > 48 * 48 * 128 * 128 * 4


def test_layers_above_the_last_tap_cost_nothing() -> None:
    facts = TargetFacts.from_config(QWEN3_8B)
    whole, cut = target_cost(facts), target_cost(facts, layers=34)
    assert cut.prefill_flops(1024) / whole.prefill_flops(1024) == 34 / 36


def test_attention_grows_with_the_square_of_the_length() -> None:
    cost = target_cost(TargetFacts.from_config(QWEN3_8B))
    linear = 2.0 * cost.active_layer_parameters
    long, short = (cost.prefill_flops(t) - linear * t for t in (8192, 4096))
    assert abs(long / short - 4) < 0.01


TOKENS = 128
"""Two chunks of linear attention."""


def solving(matrix: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """A triangular system: half a product. Torch counts none."""
    batch = 1
    for size in right[:-2]:
        batch *= size
    return int(batch * matrix[-1] ** 2 * right[-1])


def decoder_of(folder: Path, facts: TargetFacts) -> Any:
    model = getattr(transformers, facts.architecture).from_pretrained(folder, attn_implementation="eager")
    if facts.moe is not None:
        model.set_experts_implementation("eager")
    return getattr(model.model, "language_model", model.model)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[TargetFacts, Any]:
    name: Family = request.param
    folder = tiny_target(name)
    facts = TargetFacts.from_folder(folder)
    return facts, decoder_of(folder, facts)


@torch.no_grad()
def test_flops_of_each_family_are_within_2_percent_of_torchs_count(family: tuple[TargetFacts, Any]) -> None:
    facts, decoder = family
    system = {torch.ops.aten.linalg_solve_triangular: solving}
    with FlopCounterMode(display=False, custom_mapping=system) as counter:
        decoder(input_ids=torch.arange(TOKENS).remainder(200)[None], use_cache=False)
    cost = target_cost(facts)
    # The plain form computes whole squares of attention, of which a causal kernel computes half.
    squares = cost.attention_flops_per_pair * (TOKENS * TOKENS - TOKENS * (TOKENS + 1) / 2)
    assert cost.prefill_flops(TOKENS) + squares == pytest.approx(counter.get_total_flops(), rel=0.02)


@torch.no_grad()
def test_bytes_of_each_family_are_within_2_percent_of_what_torch_holds(
    family: tuple[TargetFacts, Any],
) -> None:
    facts, decoder = family
    cost = target_cost(facts)
    held = sum(parameter.numel() for parameter in decoder.parameters())
    assert cost.parameters == pytest.approx(held, rel=0.02)  # tied: the head is the embedding
    cache = decoder(input_ids=torch.arange(TOKENS)[None], use_cache=True).past_key_values
    keys = states = 0
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            keys += 2 * (layer.keys.numel() + layer.values.numel())
        for state in getattr(layer, "recurrent_states", {}).values():
            states += 4 * state.numel()
        for state in getattr(layer, "conv_states", {}).values():
            states += 2 * state.numel() * (facts.linear.conv_kernel - 1) // state.shape[-1]
    assert cost.cache_bytes_per_token * TOKENS == keys
    assert cost.state_bytes_per_sequence == pytest.approx(states, rel=0.02)
