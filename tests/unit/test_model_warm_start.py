"""A drafter can start from the target's last layers, where the sizes agree."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.errors import ConfigurationError
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.shape import resolve_shape
from dflash.model.warm_start import start_from_target
from dflash.resource.model import DraftModel
from tests.support.tiny import tiny_target


def drafter_for(folder: Path, **fields: object) -> DFlashDrafter:
    facts = TargetFacts.from_folder(folder)
    model = DraftModel.model_validate(
        {"layers": 2, "blockSize": 4, "slidingWindow": 0, "taps": [1, 2], **fields}
    )
    return DFlashDrafter(
        resolve_shape(model.model_copy(update={"mask_token_id": facts.vocab_size - 1}), facts)
    )


def test_layers_and_norm_are_the_targets_last_ones() -> None:
    folder = tiny_target("llama")
    drafter = drafter_for(folder)
    start_from_target(drafter, str(folder))
    weights = load_file(folder / "model.safetensors")
    last = TargetFacts.from_folder(folder).layers - 1
    for rest in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        ours = drafter.get_parameter(f"layers.1.{rest}")
        assert torch.equal(ours, weights[f"model.layers.{last}.{rest}"].to(ours.dtype))
    assert torch.equal(drafter.norm.weight, weights["model.norm.weight"].float())


def test_the_fusion_begins_by_passing_on_the_last_tap() -> None:
    folder = tiny_target("llama")
    drafter = drafter_for(folder)
    start_from_target(drafter, str(folder))
    width = drafter.shape.hidden_size
    taps = torch.randn(5, drafter.shape.tap_width)
    passed = torch.nn.functional.cosine_similarity(drafter.fc(taps), taps[:, -width:])
    assert passed.min() > 0.95


def test_a_drafter_of_another_size_is_refused_with_the_tensor_named() -> None:
    folder = tiny_target("llama")
    drafter = drafter_for(folder, intermediateSize=24)
    with pytest.raises(ConfigurationError, match=r"training\.start: target needs layers\.\d+\.mlp"):
        start_from_target(drafter, str(folder))
