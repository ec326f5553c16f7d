"""Declarations and targets to plan for: published config.json sizes, and a spec with few words."""

from typing import Any

from dflash.model.facts import TargetFacts
from dflash.model.shape import resolve_shape
from dflash.planning.assumptions import Assumptions
from dflash.planning.hardware import GPUS
from dflash.planning.job import Job
from dflash.resource import Drafter, DrafterSpec

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN36_27B: dict[str, Any] = {
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
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
}
QWEN36_DRAFT = {"heads": 32, "kvHeads": 8, "headDim": 128}
"""The published drafter's heads; its other sizes are the defaults."""


def spec(**sections: Any) -> DrafterSpec:
    """A spec with these sections, cross entropy alone where `training` does not say otherwise."""
    training = {"loss": {"klWeight": 0.0}} | sections.pop("training", {})
    drafter = {"maskTokenId": 151669} | sections.pop("drafter", {})
    return Drafter.model_validate(
        {
            "apiVersion": "dflash.dev/v1alpha1",
            "kind": "Drafter",
            "metadata": {"name": "planned"},
            "spec": {
                "target": {"model": "org/model"},
                "prompts": {"uri": "prompts.jsonl"},
                "storage": {"uri": "state"},
                "training": training,
                "drafter": drafter,
                **sections,
            },
        }
    ).spec


def job(config: dict[str, Any], gpu: str, *, answers: float = 500_000, **sections: Any) -> Job:
    """A job for a target on a built-in GPU."""
    facts, declared = TargetFacts.from_config(config), spec(**sections)
    return Job(facts, resolve_shape(declared.drafter, facts), declared, answers, GPUS[gpu])


def lengths(prompt: float, response: float, **known: float) -> Assumptions:
    """Assumptions with known lengths and nothing dropped."""
    return Assumptions().known(
        "this test",
        **{"prompt_tokens": prompt, "response_tokens": response, "dropped_share": 0.0, **known},
    )
