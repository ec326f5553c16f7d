"""What is read from a target's config.json, in the spellings that are about."""

import json

import pytest

from dflash.errors import ConfigurationError
from dflash.model.facts import TargetFacts
from tests.support.tiny import FAMILIES, tiny_target

BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_of_every_family_equal_what_transformers_reads(family):
    from transformers import AutoConfig

    folder = tiny_target(family)
    facts = TargetFacts.from_folder(folder)
    text = AutoConfig.from_pretrained(folder).get_text_config()
    assert facts.hidden_size == text.hidden_size
    assert facts.layers == text.num_hidden_layers
    assert facts.heads == text.num_attention_heads
    assert facts.kv_heads == text.num_key_value_heads
    assert facts.head_dim == text.head_dim
    assert facts.vocab_size == text.vocab_size
    assert facts.rope_theta == text.rope_parameters["rope_theta"] == 50_000.0
    assert facts.tied
    assert facts.special_ids == {256, 258}


def test_a_hybrid_in_a_vision_wrapper_is_seen_through():
    facts = TargetFacts.from_folder(tiny_target("qwen3_5"))
    assert facts.nested
    assert facts.hybrid
    assert facts.layer_kinds == ("linear_attention", "full_attention") * 2
    assert facts.partial_rotary == 0.25
    assert facts.linear is not None
    assert facts.linear.value_heads == 4


def test_experts_are_counted():
    moe = TargetFacts.from_folder(tiny_target("qwen3_moe")).moe
    assert moe is not None
    assert (moe.experts, moe.experts_per_token, moe.sparse_layers) == (4, 2, 4)


def test_both_rope_spellings_are_read():
    old = TargetFacts.from_config(BASE | {"rope_theta": 1e6})
    new = TargetFacts.from_config(BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    per_kind = TargetFacts.from_config(
        BASE
        | {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        }
    )
    assert old.rope_theta == new.rope_theta == per_kind.rope_theta == 1e6


def test_tying_follows_the_configuration_then_the_family():
    assert not TargetFacts.from_config(BASE).tied
    assert TargetFacts.from_config(BASE | {"tie_word_embeddings": True}).tied
    assert TargetFacts.from_config(BASE | {"model_type": "gemma2"}).tied


@pytest.mark.parametrize(
    ("said", "there"),
    [
        ({"num_nextn_predict_layers": 1}, True),
        ({"mtp_num_hidden_layers": 1}, True),
        ({"num_nextn_predict_layers": 0, "model_type": "qwen3_next"}, False),
        ({"model_type": "qwen3_next"}, True),
        ({}, False),
    ],
)
def test_prediction_layers_are_declared_or_known_of_the_family(said, there):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
    config = {**sizes, "intermediate_size": 8, "model_type": "llama", **said}
    assert TargetFacts.from_config(config).predicts_ahead is there
    assert TargetFacts.from_config({"text_config": config}).predicts_ahead is there


def test_a_target_with_experts_only_has_the_width_of_one_tokens_experts():
    config = {k: v for k, v in BASE.items() if k != "intermediate_size"}
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert TargetFacts.from_config(config).intermediate_size == 64


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_size_is_refused_by_name(missing):
    config = {k: v for k, v in BASE.items() if k != missing}
    with pytest.raises(ConfigurationError, match=missing):
        TargetFacts.from_config(config)


def test_an_absent_or_broken_file_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        TargetFacts.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TargetFacts.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigurationError, match="not a JSON object"):
        TargetFacts.from_folder(tmp_path)
