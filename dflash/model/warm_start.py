"""Starts a drafter from the target's own last layers instead of from noise.

A drafter's layer has the form of a target's: the last N layers already turn states into what the
head reads, so with little data much less has to be learnt. The fusion starts by passing on the last
tap, which is close to the input those layers were made for. What is exported has the same form and
names as ever. Not for targets whose last layers are of another kind or size: they are refused.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash.errors import ConfigurationError
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.source import TensorPlace, model_folder, tensor_places

_FUSION_STD = 0.002
"""Noise of the fusion's weights around passing on the last tap: a tenth of the usual initial std."""


@torch.no_grad()
def start_from_target(drafter: DFlashDrafter, model: str, revision: str | None = None) -> None:
    """Overwrite a fresh drafter's weights: layers and final norm from the target, fusion as above.

    ConfigurationError names the first tensor that the target does not have in the drafter's size.
    """
    folder = model_folder(model, revision)
    facts = TargetFacts.from_folder(folder)
    places = tensor_places(folder)
    shape = drafter.shape
    first = facts.layers - shape.layers
    for name, parameter in drafter.named_parameters():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = f"layers.{first + int(index)}.{rest}"
            if rest.endswith(("q_norm.weight", "k_norm.weight")) and _place(places, source) is None:
                continue  # a target without these norms: ones, as initialised
            parameter.copy_(_read(places, source, parameter, folder))
        elif name == "norm.weight":
            parameter.copy_(_read(places, name, parameter, folder))
    drafter.fc.weight.mul_(_FUSION_STD / float(drafter.fc.weight.std()))
    drafter.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)


def _place(places: dict[str, TensorPlace], suffix: str) -> TensorPlace | None:
    """The language model's tensor of that name, whatever wraps it."""
    for name in sorted(places, key=len):
        if name == suffix or (name.endswith(f".{suffix}") and "visual" not in name and "vision" not in name):
            return places[name]
    return None


def _read(places: dict[str, TensorPlace], name: str, like: Tensor, folder: Path) -> Tensor:
    place = _place(places, name)
    found = "absent" if place is None else str(list(place.shape))
    if place is None or place.shape != tuple(like.shape):
        raise ConfigurationError(
            f"training.start: target needs {name} of {list(like.shape)} in {folder}, where it is {found}; "
            "leave drafter.heads, kvHeads, headDim and intermediateSize to the target, or use start: random"
        )
    key = next(k for k, p in places.items() if p is place)
    with safe_open(place.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor.to(like.dtype)
