"""A target's parameters, FLOPs and bytes follow from config.json, for each family of layers."""

from dflash.model.facts import TargetFacts
from dflash.planning.target_cost import target_cost
from tests.support.planning import QWEN3_8B, QWEN36_27B


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
