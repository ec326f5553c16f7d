"""A target's parameters, FLOPs and bytes follow from config.json, for each family of layers."""

from dflash.model.facts import TargetFacts
from dflash.planning.target_cost import target_cost

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN36_27B = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "vocab_size": 248320,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17408,
        "tie_word_embeddings": False,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
}


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
