"""Drafters as files: the published format that SGLang and vLLM load, and the gate an export must pass.

An export is config.json and model.safetensors, bf16. Engines skip tensors they do not know and fall
back where a field is missing, so nearly every mistake here would only show as an acceptance length
of one; `check_export` therefore compares what was written with what was trained, to the bit.

Not for: optimiser state and resuming (`dflash.training`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dflash.errors import ConfigurationError, DflashError
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.heads import HEADS
from dflash.model.shape import DraftShape, check_fits

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_PROBE_CONTEXT = 24


class ExportError(DflashError):
    """An export that differs from the drafter it was made of; it must not be promoted."""


def export_files(drafter: DFlashDrafter, shape: DraftShape, facts: TargetFacts) -> dict[str, bytes]:
    """The export's files by name. Refuses a drafter with a non-finite weight, or made for another target."""
    check_fits(shape, facts)
    tensors = exported_tensors(drafter)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ExportError(f"{name} holds values that are not finite; export an earlier checkpoint")
    config = json.dumps(export_config(shape), indent=2) + "\n"
    return {CONFIG: config.encode(), WEIGHTS: save(tensors, {"format": "pt"})}


def exported_tensors(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """What an export of this drafter holds: every parameter under its published name, bf16, on the CPU."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in drafter.state_dict().items()
    }


def export_config(shape: DraftShape) -> dict[str, Any]:
    """config.json of an export.

    The block size is written in both places that readers look at, and the rotary base in both
    spellings; older loaders know only the flat one, transformers 5 only `rope_parameters`.
    """
    sliding = shape.sliding_window is not None
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "num_target_layers": shape.target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.taps),
            "block_size": shape.block_size,
            **_head_fields(shape),
        },
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
        "layer_types": list(shape.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": shape.sliding_window,
        "max_window_layers": shape.layers,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _head_fields(shape: DraftShape) -> dict[str, Any]:
    with torch.device("meta"):
        return HEADS[shape.head](shape).config()


def shape_of_config(config: dict[str, Any], where: str = CONFIG) -> DraftShape:
    """The drafter's shape that a config.json in the published format declares.

    ConfigurationError when a field that cannot be guessed is missing, or two spellings disagree.
    """
    draft = config.get("dflash_config")
    if not isinstance(draft, dict):
        raise ConfigurationError(f"{where} has no dflash_config; it is no DFlash drafter")

    def field(name: str) -> Any:
        if config.get(name) is None:
            raise ConfigurationError(f"{where} has no {name}; export the drafter again")
        return config[name]

    block_sizes = {size for size in (config.get("block_size"), draft.get("block_size")) if size}
    thetas = {
        float(theta)
        for theta in (config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta"))
        if theta
    }
    for name, found in (("block_size", block_sizes), ("rope_theta", thetas)):
        if len(found) != 1:
            raise ConfigurationError(
                f"{where} gives {sorted(found) or 'no'} {name}; export the drafter again, with one value"
            )
    for name in ("mask_token_id", "target_layer_ids"):
        if draft.get(name) is None:
            raise ConfigurationError(f"{where} has no dflash_config.{name}; export the drafter again")
    layers = int(field("num_hidden_layers"))
    layer_types = tuple(config.get("layer_types") or ("full_attention",) * layers)
    head = str(draft.get("projector_type") or "dflash")
    if head not in HEADS:
        raise ConfigurationError(f"{where} names the head {head!r}; known are {', '.join(sorted(HEADS))}")
    return DraftShape(
        hidden_size=int(field("hidden_size")),
        layers=layers,
        heads=int(field("num_attention_heads")),
        kv_heads=int(field("num_key_value_heads")),
        head_dim=int(field("head_dim")),
        intermediate_size=int(field("intermediate_size")),
        vocab_size=int(field("vocab_size")),
        block_size=int(block_sizes.pop()),
        taps=tuple(int(tap) for tap in draft["target_layer_ids"]),
        target_layers=int(field("num_target_layers")),
        mask_token_id=int(draft["mask_token_id"]),
        rope_theta=thetas.pop(),
        rms_norm_eps=float(field("rms_norm_eps")),
        max_positions=int(field("max_position_embeddings")),
        layer_types=layer_types,
        sliding_window=int(field("sliding_window")) if "sliding_attention" in layer_types else None,
        tied=bool(config.get("tie_word_embeddings")),
        head=head,
        head_state=int(draft.get("gru_hidden_dim") or 0),
        head_rank=int(draft.get("emb_dim") or 0),
    )


def load_export(folder: str | Path) -> tuple[DFlashDrafter, DraftShape]:
    """A drafter and its shape from an export's folder. Parameters are fp32 with bf16 values.

    Strict: every tensor must be there, in bf16, of the right shape, finite, and no other.
    """
    folder = Path(folder)
    try:
        shape = shape_of_config(json.loads((folder / CONFIG).read_text()), str(folder / CONFIG))
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{error.filename or folder} is missing; it is no drafter's folder"
        ) from None
    except (ValueError, SafetensorError) as error:
        raise ConfigurationError(f"{folder} cannot be read ({error}); fetch or export it again") from error
    with torch.device("meta"):
        drafter = DFlashDrafter(shape)
    problems = _differences({n: (t.shape, torch.bfloat16) for n, t in drafter.state_dict().items()}, tensors)
    if problems:
        raise ConfigurationError(f"{folder / WEIGHTS}: {problems[0]}; export the drafter again")
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return drafter, shape


def check_export(folder: str | Path, drafter: DFlashDrafter, facts: TargetFacts) -> None:
    """The gate: ExportError unless the folder holds exactly this drafter, for this target.

    Compares config.json field by field; the set of names, shapes and dtypes; every value; and, with
    what `load_export` makes of the files, the states proposed for fixed inputs, with and without
    cached context. Serving it is a gate of its own (`dflash.evaluation`).
    """
    folder = Path(folder)
    check_fits(drafter.shape, facts)
    expected_config = export_config(drafter.shape)
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"{folder} cannot be read back ({error}); export again") from error
    for name in sorted(expected_config.keys() | config.keys()):
        if config.get(name, "nothing") != expected_config.get(name, "nothing"):
            raise ExportError(
                f"{folder / CONFIG}: {name} is {config.get(name, 'nothing')!r} but the trained drafter has "
                f"{expected_config.get(name, 'nothing')!r}; export again"
            )
    expected = exported_tensors(drafter)
    problems = _differences({n: (t.shape, t.dtype) for n, t in expected.items()}, tensors)
    problems += [
        f"{n} has other values" for n in expected if not problems and not torch.equal(expected[n], tensors[n])
    ]
    if problems:
        raise ExportError(f"{folder / WEIGHTS}: {problems[0]}; export again")
    loaded, _ = load_export(folder)
    trained = DFlashDrafter(drafter.shape)
    trained.load_state_dict({name: tensor.float() for name, tensor in expected.items()})
    difference = (_probe(loaded) - _probe(trained)).abs().max()
    if not difference <= 1e-4:
        raise ExportError(
            f"{folder}: reloaded, it proposes other states than the trained drafter (by {difference:.2g}); "
            "export again"
        )


def _differences(expected: dict[str, tuple[torch.Size, torch.dtype]], found: dict[str, Tensor]) -> list[str]:
    """What is wrong with names, shapes, dtypes or finiteness, one phrase each."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unknown to the format" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        shape, dtype = expected[name]
        tensor = found[name]
        if tensor.shape != shape:
            problems.append(f"{name} is {list(tensor.shape)} and should be {list(shape)}")
        elif tensor.dtype != dtype:
            problems.append(f"{name} is {tensor.dtype} and should be {dtype}")
        elif not torch.isfinite(tensor).all():
            problems.append(f"{name} holds values that are not finite")
    return problems


@torch.no_grad()
def _probe(drafter: DFlashDrafter) -> Tensor:
    """States proposed after a fixed random context, taken in at once and in two parts: [2, B, D]."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(_PROBE_CONTEXT, shape.tap_width, generator=generator)
    inputs = torch.randn(shape.block_size, shape.hidden_size, generator=generator)
    half = _PROBE_CONTEXT // 2
    first, second = drafter.new_cache(), drafter.new_cache()
    at_once = drafter.propose(inputs, taps, first, _PROBE_CONTEXT)
    drafter.propose(inputs, taps[:half], second, half)
    return torch.stack([at_once, drafter.propose(inputs, taps[half:], second, _PROBE_CONTEXT)])
