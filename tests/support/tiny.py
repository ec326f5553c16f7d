"""Tiny random targets of every supported family, saved as transformers would, with a tokenizer.

Vocabulary: 256 byte tokens, then special tokens (see SPECIALS); rows from `len(tokenizer)` on are
unused. Weights are random but fixed by a seed, scaled so that hidden states vary between tokens.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dflash.model.shape import DraftShape
from dflash.model.states import States
from dflash.model.target import Tables
from dflash.objective.batch import Sample
from tests.support.tiny_tokenizer import TEMPLATE, tiny_tokenizer

Family = Literal["llama", "qwen3", "qwen3_moe", "qwen3_5"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "qwen3_moe", "qwen3_5")
VOCABULARY = 320


def save_tiny_target(
    folder: Path,
    family: Family = "llama",
    *,
    layers: int = 4,
    hidden: int = 64,
    tied: bool = True,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    template: str | None = TEMPLATE,
) -> Path:
    """Write a random target of this family, fp32, and its tokenizer; gives the folder back."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "initializer_range": 0.1,
    }
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, rope_parameters=rope))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, head_dim=32, rope_parameters=rope))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, head_dim=32, rope_parameters=rope))
    else:
        model = _qwen3_5(common, rope, tied)
    model.save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


def _qwen3_5(common: dict[str, Any], rope: dict[str, Any], tied: bool) -> Any:
    """Hybrid linear attention, partial rotary, inside a vision wrapper."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = common | {
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
        "rope_parameters": rope | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": common["hidden_size"],
        "num_position_embeddings": 16,
    }
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    )


@functools.cache
def tiny_target(family: Family = "llama", tied: bool = True) -> Path:
    """Folder of a tiny target, made once per process and removed when it ends."""
    holder = tempfile.TemporaryDirectory(prefix="tiny-target-")
    _holders.append(holder)
    return save_tiny_target(Path(holder.name), family, tied=tied)


_holders: list[tempfile.TemporaryDirectory[str]] = []


def draft_shape(**changes: Any) -> DraftShape:
    """A small drafter's shape: 2 layers (sliding, full), blocks of 4, taps 1 and 3, vocabulary 320."""
    shape = DraftShape(
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=VOCABULARY,
        block_size=4,
        taps=(1, 3),
        target_layers=4,
        mask_token_id=262,
        rope_theta=50_000.0,
        rms_norm_eps=1e-6,
        max_positions=4096,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=16,
        tied=True,
    )
    return dataclasses.replace(shape, **changes)


def random_tables(shape: DraftShape, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tables:
    """Untied random tables of a drafter's target."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.vocab_size, shape.hidden_size)
    embedding, head = (torch.randn(size, generator=generator) * 0.2 for _ in range(2))
    return Tables(embedding.to(dtype), head.to(dtype))


def random_sample(
    shape: DraftShape, length: int, prompt: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Sample:
    """Random ids and states; tokens from `prompt` on are supervised."""
    generator = torch.Generator().manual_seed(seed)
    return Sample(
        sample_id=f"sample-{seed}-{length}",
        ids=torch.randint(0, 256, (length,), generator=generator),
        supervised=torch.arange(length) >= prompt,
        states=States(
            torch.randn(length, shape.tap_width, generator=generator).to(dtype),
            torch.randn(length, shape.hidden_size, generator=generator).to(dtype),
        ),
    )
