"""The frozen target: loads it, captures hidden states, and reads its two tables.

`TargetModel.capture` is what a target process serves. `load_tables` gives a drafter process the
embedding and the head without the rest of the model. Not for: generation or verification.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dflash.errors import ConfigurationError
from dflash.model.facts import TargetFacts
from dflash.model.source import fingerprint, model_folder, tensor_places
from dflash.model.states import States

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "embed_tokens.weight",
    "language_model.embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_GPU_PADDING = 0.15
"""Most padding in a forward of several samples, as a share of it. On a CPU, which gains nothing by
batching, only samples of equal length share one."""


@dataclass(frozen=True)
class Tables:
    """The target's frozen embedding and output head, both [V, D]; one tensor where they are tied."""

    embedding: Tensor
    head: Tensor


class _LastLayerReached(Exception):  # noqa: N818  (control flow, never seen outside)
    """Raised by the hook of the last wanted layer, to skip those above it."""


class TargetModel:
    """A frozen target of any family that transformers loads.

    `decoder` is the module with embedding, layers and final norm; its output is the final normed state.
    """

    def __init__(self, decoder: nn.Module, facts: TargetFacts, identity: str) -> None:
        self.facts = facts
        self.fingerprint = identity
        self.decoder = decoder
        self._layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]
        self.device = next(decoder.parameters()).device
        self._padding = 0.0 if self.device.type == "cpu" else _GPU_PADDING
        self.dtype = next(decoder.parameters()).dtype

    @torch.inference_mode()
    def capture(self, batch: Sequence[np.ndarray], taps: Sequence[int], final: bool) -> list[States]:
        """Hidden states of each sample, as if it were alone.

        batch: one array of token ids [T] a sample, T >= 1. taps: 0-based layers, in the order wanted
        (any order, no repeats). Samples of like length share a forward, padded on the right: in a
        causal model, recurrent or not, nothing behind a token bears on it, so there is no leakage
        and no mask. Layers above the last tap are skipped unless `final` is asked for.
        """
        for tap in taps:
            if not 0 <= tap < self.facts.layers:
                raise ConfigurationError(
                    f"taps: {tap} is out of range; the target has layers 0 to {self.facts.layers - 1}"
                )
        states: list[States | None] = [None] * len(batch)
        for members in _groups([len(ids) for ids in batch], self._padding):
            longest = max(len(batch[i]) for i in members)
            tokens = np.zeros((len(members), longest), dtype=np.int64)
            for row, i in enumerate(members):
                tokens[row, : len(batch[i])] = batch[i]
            hidden, normed = self._forward(torch.from_numpy(tokens).to(self.device), taps, final)
            joined = torch.cat(hidden, dim=-1)
            for row, i in enumerate(members):
                length = len(batch[i])
                # Views: what else they keep alive is the padding, and samples that are sent with this one.
                states[i] = States(joined[row, :length], None if normed is None else normed[row, :length])
        return [state for state in states if state is not None]

    def _forward(
        self, tokens: Tensor, taps: Sequence[int], final: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Outputs of the tapped layers, each [N, T, D], and the final normed state or None."""
        captured: dict[int, Tensor] = {}
        with self._hooks(captured, set(taps), last=None if final else max(taps)):
            try:
                output = self.decoder(input_ids=tokens, use_cache=False)
            except _LastLayerReached:
                output = None
        return [captured[tap] for tap in taps], output.last_hidden_state if output is not None else None

    @contextmanager
    def _hooks(self, captured: dict[int, Tensor], taps: set[int], last: int | None) -> Iterator[None]:
        """Record the tapped layers' outputs while the block runs; the last layer's before the final norm."""

        def hook_of(index: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                captured[index] = output[0] if isinstance(output, tuple) else output
                if index == last:
                    raise _LastLayerReached

            return hook

        handles: list[RemovableHandle] = []
        try:
            handles.extend(self._layers[tap].register_forward_hook(hook_of(tap)) for tap in taps)
            yield
        finally:
            for handle in handles:
                handle.remove()


def _groups(lengths: Sequence[int], padding: float) -> list[list[int]]:
    """Indexes put together by length, so that at most a share `padding` of a forward is padding."""
    groups: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            longest = lengths[groups[-1][0]]
            padded = longest * (len(groups[-1]) + 1)
            if padded - (tokens + lengths[i]) <= padding * padded:
                groups[-1].append(i)
                tokens += lengths[i]
                continue
        groups.append([i])
        tokens = lengths[i]
    return groups


def load_target(
    model: str,
    revision: str | None = None,
    dtype: str = "bfloat16",
    device: str | torch.device = "cpu",
    *,
    devices: int = 1,
) -> TargetModel:
    """Load a hub id or folder for capture: the decoder alone, frozen, without head or vision tower.

    With `devices` above 1 this process gets its rank's part only, by transformers' tensor-parallel plan. The
    default process group must be there, of that size, and each rank must call alike, now and to capture.
    """
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = model_folder(model, revision)
    facts = TargetFacts.from_folder(folder)
    identity = fingerprint(folder)
    factory = getattr(transformers, facts.architecture, None) or transformers.AutoModelForCausalLM
    parts = {"distributed_config": DistributedConfig(tp_size=devices)} if devices > 1 else {}
    try:
        loaded = factory.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", **parts
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigurationError(
            f"target.model: {folder} cannot be loaded ({str(error).strip().splitlines()[0]}); "
            "check that its files are whole and that its architecture is known to transformers"
        ) from error
    decoder = _decoder_of(loaded, facts, folder)
    decoder.requires_grad_(False).eval()
    if devices == 1:  # else each part is where it belongs already
        decoder.to(device)
    return TargetModel(decoder, facts, identity)


def _decoder_of(model: nn.Module, facts: TargetFacts, folder: Path) -> nn.Module:
    """The module with the language model's embedding, layers and final norm, however deep it lies."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if (
            isinstance(layers, nn.ModuleList)
            and len(layers) == facts.layers
            and hasattr(module, "embed_tokens")
            and hasattr(module, "norm")
        ):
            decoder: nn.Module = module
            return decoder
    raise ConfigurationError(
        f"target.model: {folder} ({facts.architecture}) has no module with {facts.layers} layers, "
        "an embedding and a final norm; this architecture is not supported"
    )


def load_tables(
    model: str, revision: str | None = None, dtype: str = "bfloat16", device: str | torch.device = "cpu"
) -> Tables:
    """Read the target's embedding and head, and nothing else of it.

    Tied tables are one tensor. ConfigurationError when a tensor is absent, or not [V, D] as
    config.json says: a head is never made up.
    """
    folder = model_folder(model, revision)
    facts = TargetFacts.from_folder(folder)
    places = tensor_places(folder)

    def read(candidates: Sequence[str], what: str) -> Tensor:
        name = next((name for name in candidates if name in places), None)
        if name is None:
            raise ConfigurationError(
                f"target.model: {folder} has no {what} (looked for {', '.join(candidates)}), and config.json "
                f"says tie_word_embeddings is {str(facts.tied).lower()}; "
                "correct config.json or fetch the missing file"
            )
        place = places[name]
        if place.shape != (facts.vocab_size, facts.hidden_size):
            raise ConfigurationError(
                f"target.model: {name} in {place.file} is {list(place.shape)} but config.json says "
                f"[{facts.vocab_size}, {facts.hidden_size}]; use matching files"
            )
        with safe_open(place.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(device=device, dtype=getattr(torch, dtype))

    embedding = read(_EMBEDDINGS, "embedding")
    return Tables(embedding, embedding if facts.tied else read(_HEADS, "head"))
