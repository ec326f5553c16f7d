"""Output heads by name: what stands between the drafter's states and the target's frozen head.

A head may add modules to the drafter (under the names that engines load), fields to its config.json,
and a low-rank correction of the logits: features [rows, r] @ table^T, table [V, r]. Adding a head
means adding a class here and a line to HEADS; backbone, taps, mask and step stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash.model.shape import DraftShape


class Head:
    """DFlash's own: the target's head on the drafter's states, and nothing more. Base of the others."""

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape

    def modules(self) -> dict[str, nn.Module]:
        """Modules to add to the drafter, by name."""
        return {}

    def config(self) -> dict[str, Any]:
        """Fields of `dflash_config` that engines need."""
        return {}

    def correction(self, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Features [N, B, r] and table [V, r], or None for a head that corrects nothing.

        states [N, B, D]: the drafter's states. previous [N, B, D]: embeddings of the block's tokens,
        so that slot k may use those of slots 0..k-1 (the true ones in training, the proposed ones
        when decoding).
        """
        return None


class DominoHead(Head):
    """Domino (arXiv 2605.29707): a GRU over the block's tokens corrects slots 2..B-1.

    Slot k reads the GRU's state after tokens 0..k-1 of its block beside its own state:
    correction = E2 silu(E1 [state_k ; gru_k]). Slot 1 keeps the plain logits. No biases. Labels are not
    shifted: slot k proposes its own position, as in DFlash.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.prefix_gru = nn.GRU(shape.hidden_size, shape.head_state, bias=False, batch_first=True)
        self.inner = nn.Linear(shape.hidden_size + shape.head_state, shape.head_rank, bias=False)
        self.outer = nn.Linear(shape.head_rank, shape.vocab_size, bias=False)

    def modules(self) -> dict[str, nn.Module]:
        """`prefix_gru` and `embed_proj`, as SGLang names them."""
        return {
            "prefix_gru": self.prefix_gru,
            "embed_proj": nn.Sequential(self.inner, nn.SiLU(), self.outer),
        }

    def config(self) -> dict[str, Any]:
        """The fields by which SGLang knows the head."""
        return {
            "projector_type": "domino",
            "shift_label": False,
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": self.shape.head_state,
            "emb_dim": self.shape.head_rank,
        }

    def correction(self, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Head.correction`."""
        blocks, size, _ = states.shape
        plain = states.new_zeros(blocks, min(2, size), self.shape.head_rank)
        if size <= 2:
            return plain, self.outer.weight
        weights: dict[str, Tensor] = dict(self.prefix_gru.named_parameters())
        of_input = functional.linear(previous, weights["weight_ih_l0"].to(states.dtype))
        recurrent = weights["weight_hh_l0"].to(states.dtype)
        state = states.new_zeros(blocks, self.shape.head_state)
        read = []
        for k in range(size - 1):
            state = _gru_step(of_input[:, k], functional.linear(state, recurrent), state)
            read.append(state)
        joined = torch.cat([states[:, 2:], torch.stack(read[1:], 1)], -1)
        features = functional.silu(functional.linear(joined, self.inner.weight.to(states.dtype)))
        return torch.cat([plain, features], 1), self.outer.weight


def _gru_step(of_input: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
    """One step of a GRU without biases; gate order reset, update, new, as torch's."""
    reset_i, update_i, new_i = of_input.chunk(3, -1)
    reset_s, update_s, new_s = of_state.chunk(3, -1)
    update = torch.sigmoid(update_i + update_s)
    candidate = torch.tanh(new_i + torch.sigmoid(reset_i + reset_s) * new_s)
    return candidate + update * (state - candidate)


HEADS: dict[str, type[Head]] = {"dflash": Head, "domino": DominoHead}
