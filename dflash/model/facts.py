"""What a target's config.json says: sizes, layer kinds, rotary settings. No torch.

Understands the flat form (Llama, Qwen3, Mistral, ...) and the nested form of vision-language
wrappers, where the language model's settings are in `text_config`. Not for: loading weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import ConfigurationError

_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2")
"""Families whose transformers configuration ties the tables where config.json is silent."""
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MTP_UNSAID = ("ernie4_5_moe", "longcat_flash", "mimo", "mimo_v2_flash", "nemotron_h", "qwen3_next")
"""Families that come with multi-token prediction layers and do not say so in config.json."""


@dataclass(frozen=True)
class MoeFacts:
    """Mixture-of-experts sizes; `sparse_layers` of the layers have routed experts."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    sparse_layers: int


@dataclass(frozen=True)
class LinearAttentionFacts:
    """Sizes of gated-delta-net layers (the Qwen3-Next and Qwen3.5 families)."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True)
class LatentAttentionFacts:
    """Sizes of multi-head latent attention (the DeepSeek family)."""

    kv_lora_rank: int
    q_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class TargetFacts:
    """A target's language model, as its config.json declares it.

    `layer_kinds` has one entry a layer: full_attention, sliding_attention or linear_attention.
    `partial_rotary` is the share of a head that the target rotates; a drafter rotates whole heads.
    `special_ids` are the begin, end and padding tokens that the configuration names.
    `predicts_ahead`: it comes with layers of its own for multi-token prediction.
    """

    model_type: str
    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary: float
    max_positions: int
    tied: bool
    nested: bool
    layer_kinds: tuple[str, ...]
    special_ids: frozenset[int]
    dtype: str
    gated_query: bool = False
    predicts_ahead: bool = False
    moe: MoeFacts | None = None
    linear: LinearAttentionFacts | None = None
    latent: LatentAttentionFacts | None = None

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a recurrent state instead of keys and values."""
        return "linear_attention" in self.layer_kinds

    @classmethod
    def from_folder(cls, folder: str | Path) -> "TargetFacts":
        """Read `folder/config.json`; ConfigurationError when it is absent or incomplete."""
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigurationError(
                f"target.model: {path} does not exist; give a hub id or a folder with config.json"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"target.model: {path} cannot be read ({error}); repair it") from error
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> "TargetFacts":
        """Take the facts from a parsed config.json; `where` names it in errors."""
        if not isinstance(config, Mapping):
            raise ConfigurationError(
                f"target.model: {where} is not a JSON object; give a model's config.json"
            )
        nested = isinstance(config.get("text_config"), Mapping)
        text: Mapping[str, Any] = config["text_config"] if nested else config

        def required(name: str) -> int:
            value = text.get(name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"target.model: {where} has no usable {name} (found {value!r}); "
                    "only decoder language models can be targets"
                )
            return value

        hidden, layers, heads = (
            required(n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        kinds = _layer_kinds(text, layers)
        moe = _moe(text, layers)
        return cls(
            model_type=str(text.get("model_type") or config.get("model_type") or ""),
            architecture=str((config.get("architectures") or [""])[0]),
            hidden_size=hidden,
            layers=layers,
            vocab_size=required("vocab_size"),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate_size=_intermediate_size(text, moe, where),
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            rope_theta=float(_rope(text).get("rope_theta") or 10_000.0),
            partial_rotary=float(_rope(text).get("partial_rotary_factor") or 1.0),
            max_positions=int(text.get("max_position_embeddings") or 2048),
            tied=_tied(config, text),
            nested=nested,
            layer_kinds=kinds,
            special_ids=_special_ids(config, text),
            dtype=str(text.get("dtype") or config.get("dtype") or config.get("torch_dtype") or "float32"),
            gated_query="linear_attention" in kinds,
            predicts_ahead=_predicts_ahead(config, text),
            moe=moe,
            linear=_linear(text) if "linear_attention" in kinds else None,
            latent=_latent(text) if text.get("kv_lora_rank") else None,
        )


def _intermediate_size(text: Mapping[str, Any], moe: MoeFacts | None, where: str) -> int:
    """The MLP's width; for models with experts only, what one token's experts add up to."""
    if text.get("intermediate_size"):
        return int(text["intermediate_size"])
    if moe is not None:
        return moe.intermediate_size * moe.experts_per_token + moe.shared_intermediate_size
    raise ConfigurationError(
        f"target.model: {where} has no intermediate_size; give a model's whole config.json"
    )


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in either spelling; of one set per layer kind, full attention's."""
    rope = dict(text.get("rope_parameters") or {})
    if isinstance(rope.get("full_attention"), Mapping):
        rope = dict(rope["full_attention"])
    for name in ("rope_theta", "partial_rotary_factor"):
        rope.setdefault(name, text.get(name))
    return rope


def _layer_kinds(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """One kind per layer, from `layer_types` or the hybrid family's interval."""
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    if text.get("linear_num_value_heads"):
        interval = int(text.get("full_attention_interval") or 4)
        return tuple(
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
        )
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        full_below = int(text.get("max_window_layers") or 0)
        return tuple("full_attention" if i < full_below else "sliding_attention" for i in range(layers))
    return ("full_attention",) * layers


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    for part in (config, text):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return config.get("model_type") in _TIED_BY_DEFAULT


def _predicts_ahead(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    said = [part[name] for part in (text, config) for name in _MTP_KEYS if part.get(name) is not None]
    return any(said) if said else str(text.get("model_type") or "").removesuffix("_text") in _MTP_UNSAID


def _special_ids(config: Mapping[str, Any], text: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for part in (config, text):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            value = part.get(name)
            found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    return frozenset(found)


def _moe(text: Mapping[str, Any], layers: int) -> MoeFacts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[name]) for name in names if text.get(name)), 0)
    if experts < 2:
        return None
    width = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    dense = set(text.get("mlp_only_layers") or ())
    step = int(text.get("decoder_sparse_step") or 1)
    first = int(text.get("first_k_dense_replace") or 0)
    sparse = sum(i not in dense and i >= first and (i + 1) % step == 0 for i in range(layers))
    shared = int(
        text.get("shared_expert_intermediate_size") or int(text.get("n_shared_experts") or 0) * width
    )
    return MoeFacts(experts, int(text.get("num_experts_per_tok") or 1), width, shared, sparse)


def _linear(text: Mapping[str, Any]) -> LinearAttentionFacts:
    return LinearAttentionFacts(
        key_heads=int(text.get("linear_num_key_heads") or 16),
        value_heads=int(text.get("linear_num_value_heads") or 32),
        key_head_dim=int(text.get("linear_key_head_dim") or 128),
        value_head_dim=int(text.get("linear_value_head_dim") or 128),
        conv_kernel=int(text.get("linear_conv_kernel_dim") or 4),
    )


def _latent(text: Mapping[str, Any]) -> LatentAttentionFacts:
    return LatentAttentionFacts(
        kv_lora_rank=int(text["kv_lora_rank"]),
        q_lora_rank=int(text.get("q_lora_rank") or 0),
        rope_head_dim=int(text.get("qk_rope_head_dim") or 0),
        nope_head_dim=int(text.get("qk_nope_head_dim") or 0),
        value_head_dim=int(text.get("v_head_dim") or 0),
    )
