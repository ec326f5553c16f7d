"""The DFlash drafter: a small block-diffusion model that reads a target's hidden states.

K taps -> fc -> hidden_norm gives one context feature per token, from which every layer makes keys
and values with the same projections as for the block's own slots; queries come from the block
alone. Qwen3-style pre-norm layers, per-head query and key norms, full rotary embedding. The
embedding and the output head are the target's, frozen, and not part of it.

Module names are those of the published checkpoints. Parameters may be fp32 masters while the
forward runs in the dtype of its inputs. Not for: losses (`dflash.objective`), files (`checkpoint`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash.model.heads import HEADS
from dflash.model.mask import Attention, BlockLayout, attend_blocks, build_attention
from dflash.model.shape import DraftShape

_INIT_STD = 0.02


class Linear(nn.Linear):
    """A bias-free product in the input's dtype, whatever dtype the weight is kept in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines, fp32 [tokens, 1, head_dim / 2], of some positions."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> "Rotary":
        """positions: int64 [tokens]. Frequencies are made here in fp32: no cast of a model bears on them."""
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions.float()[:, None] * (1.0 / theta**exponents)
        return cls(angles.cos()[:, None], angles.sin()[:, None])

    def turn(self, x: Tensor) -> Tensor:
        """Rotate [tokens, heads, head_dim], halves paired (NeoX style), in fp32; the dtype is kept."""
        low, high = x.float().chunk(2, -1)
        turned = torch.cat([low * self.cos - high * self.sin, high * self.cos + low * self.sin], -1)
        return turned.to(x.dtype)


class SelfAttention(nn.Module):
    """Projections of one layer; where to look is decided by the attention passed in."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(shape.hidden_size, shape.heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[tokens, D] to [tokens, heads, head_dim]."""
        return rotary.turn(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))))

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[tokens, D] to keys and values, [tokens, kv_heads, head_dim] each."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotary.turn(keys), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to the same."""
        gated: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, rotary: Rotary, context: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """x [Q, D] with the slots' rotary; context: this layer's keys and values, [S, kv_heads, head_dim]."""
        normed = self.input_layernorm(x)
        query = self.self_attn.queries(normed, rotary)
        seen = attention(query, context, self.self_attn.keys_values(normed, rotary))
        x = x + self.self_attn.o_proj(seen.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


@dataclass
class DecodeCache:
    """Context keys and values of one sequence, per layer; grown in place. `length` tokens are in it."""

    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class DFlashDrafter(nn.Module):
    """See the module. `seed` fixes the initial weights: normal(0, 0.02), norms one."""

    def __init__(self, shape: DraftShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(shape.tap_width, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._head = HEADS[shape.head](shape)
        for name, module in self._head.modules().items():
            self.add_module(name, module)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2 and not parameter.is_meta:
                    parameter.normal_(0.0, _INIT_STD, generator=generator)

    def forward(self, taps: Tensor, inputs: Tensor, layout: BlockLayout) -> Tensor:
        """Training: every block of a packed batch at once.

        taps [S, K*D]; inputs [N*B, D], the embeddings of block tokens, whose dtype is computed in;
        gives the slots' states after the final norm, [N*B, D]. The mask is built once, here.
        """
        attention = build_attention(layout, self.shape)
        feature = self._context_feature(taps.to(inputs.dtype))
        context_rotary = self._rotary(layout.context_position)
        slot_rotary = self._rotary(layout.slot_position)
        x = inputs
        for layer, layer_type in zip(self.layers, self.shape.layer_types, strict=True):
            context = layer.self_attn.keys_values(feature, context_rotary)  # type: ignore[union-attr,operator]
            x = layer(x, slot_rotary, context, attention[layer_type])
        return self.norm(x)  # type: ignore[no-any-return]

    def new_cache(self) -> DecodeCache:
        """An empty cache for one sequence."""
        return DecodeCache()

    @torch.no_grad()
    def propose(self, inputs: Tensor, new_taps: Tensor, cache: DecodeCache, start: int) -> Tensor:
        """Decoding: one block of one sequence, after adding context to the cache.

        inputs [B, D]: embeddings of the last token and B-1 mask tokens, in the dtype to compute in.
        new_taps [t, K*D], t >= 0: taps of the tokens that follow those cached and precede `start`, the
        position of the last token; so cache.length + t == start. Gives states after the final norm,
        [B, D]: slot k >= 1 through the target's head proposes the token at start + k; slot 0 is not
        used. The block's own keys and values are not kept.
        """
        if cache.length + len(new_taps) != start:
            raise ValueError(
                f"the cache holds {cache.length} tokens and {len(new_taps)} are new, but the block starts at "
                f"{start}; pass the taps of every token before the block exactly once"
            )
        if len(new_taps):
            self._extend(cache, new_taps.to(inputs.dtype))
        slots = torch.arange(start, start + len(inputs), device=inputs.device)
        context_positions = torch.arange(start, device=inputs.device)
        rotary = self._rotary(slots)
        x = inputs
        for i, (layer, layer_type) in enumerate(zip(self.layers, self.shape.layer_types, strict=True)):
            sliding = layer_type == "sliding_attention"
            low, hidden = 0, None
            if sliding and self.shape.sliding_window is not None:
                oldest = slots - (self.shape.sliding_window - 1)
                low = max(0, start - (self.shape.sliding_window - 1))
                hidden = context_positions[low:] < oldest[:, None]

            def attention(
                query: Tensor,
                context: tuple[Tensor, Tensor],
                block: tuple[Tensor, Tensor],
                hidden: Tensor | None = hidden,
                causal: bool = sliding,
            ) -> Tensor:
                return attend_blocks(query, context, block, len(query), hidden=hidden, causal=causal)

            context = (cache.keys[i][low:start], cache.values[i][low:start]) if start else self._nothing(x)
            x = layer(x, rotary, context, attention)
        return self.norm(x)  # type: ignore[no-any-return]

    def correction(self, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:
        """The head's correction of the logits, of whole blocks: see `dflash.model.heads.Head`."""
        return self._head.correction(states, previous)

    @torch.no_grad()
    def choose(self, states: Tensor, token: int, embedding: Tensor, head: Tensor) -> Tensor:
        """The proposals of one block: int64 [B-1], for positions start+1..start+B-1.

        states [B, D] from `propose`; token: the block's first; embedding, head [V, D]: the target's. The
        argmax of every slot at once, or slot by slot where the head corrects by what was proposed.
        """
        logits = states[1:] @ head.t()
        chosen = logits.argmax(-1)
        if self.shape.head == "dflash":
            return chosen
        tokens = torch.cat([chosen.new_tensor([token]), chosen])
        for slot in range(1, len(states)):
            corrected = self.correction(states[None], embedding[tokens][None])
            if corrected is not None:
                features, table = corrected
                tokens[slot] = (logits[slot - 1] + table.to(logits.dtype) @ features[0, slot]).argmax()
        return tokens[1:]

    def _context_feature(self, taps: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(taps))  # type: ignore[no-any-return]

    def _rotary(self, positions: Tensor) -> Rotary:
        return Rotary.at(positions, self.shape.head_dim, self.shape.rope_theta)

    def _nothing(self, like: Tensor) -> tuple[Tensor, Tensor]:
        empty = like.new_zeros(0, self.shape.kv_heads, self.shape.head_dim)
        return empty, empty

    def _extend(self, cache: DecodeCache, taps: Tensor) -> None:
        """Add the context keys and values of more tokens, doubling the room where it is short."""
        end = cache.length + len(taps)
        feature = self._context_feature(taps)
        rotary = self._rotary(torch.arange(cache.length, end, device=taps.device))
        for i, layer in enumerate(self.layers):
            new = layer.self_attn.keys_values(feature, rotary)  # type: ignore[union-attr,operator]
            for store, rows in zip((cache.keys, cache.values), new, strict=True):
                if len(store) <= i:
                    store.append(rows.new_empty(0, *rows.shape[1:]))
                if len(store[i]) < end:
                    grown = rows.new_empty(max(end, 2 * len(store[i])), *rows.shape[1:])
                    grown[: cache.length] = store[i][: cache.length]
                    store[i] = grown
                store[i][cache.length : end] = rows
        cache.length = end
