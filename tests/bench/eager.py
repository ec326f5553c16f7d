"""The step as most trainers began: dense mask, padded samples, all logits. What ours is compared with.

Same drafter, same dtype, same draws: samples are padded to the longest and to the largest number of
anchors, one SDPA call with a dense mask covers the batch, every slot goes through the head (and the
teacher's states of every slot too, where there is distillation), and autograd does the rest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dflash.model.drafter import DFlashDrafter
from dflash.model.target import Tables
from dflash.objective.anchors import draw_anchors
from dflash.objective.batch import Sample
from dflash.objective.weights import Objective


def eager_step(
    drafter: DFlashDrafter, tables: Tables, samples: Sequence[Sample], objective: Objective, anchors: int
) -> Tensor:
    """One forward and backward with decay weights; gives the loss."""
    shape, size = drafter.shape, drafter.shape.block_size
    dtype = tables.embedding.dtype
    count, longest = len(samples), max(len(s.ids) for s in samples)
    drawn = [draw_anchors(s.supervised, anchors, 0, 0, s.sample_id) for s in samples]
    most = max(map(len, drawn))

    def pad(tensor: Tensor, length: int) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])

    taps = torch.stack([pad(s.states.taps, longest) for s in samples]).to(dtype)
    ids = torch.stack([pad(s.ids, longest) for s in samples])
    supervised = torch.stack([pad(s.supervised, longest) for s in samples])
    anchor = torch.stack([pad(a, most) for a in drawn])
    kept = torch.stack([torch.arange(most) < len(a) for a in drawn])
    position = anchor[..., None] + torch.arange(size)
    inside = position.clamp(max=longest - 1).flatten(1)
    labels = ids.gather(1, inside)
    valid = (position < longest).flatten(1) & supervised.gather(1, inside) & kept.repeat_interleave(size, 1)
    valid &= torch.arange(most * size) % size > 0
    tokens = torch.full((count, most, size), shape.mask_token_id)
    tokens[..., 0] = ids.gather(1, anchor)

    slots = most * size
    block = torch.arange(slots) // size
    own = (block[:, None] == block).expand(count, slots, slots)
    seen = torch.arange(longest) < anchor.repeat_interleave(size, 1)[..., None]
    mask = torch.cat([seen, own], -1)[:, None]

    x = functional.embedding(tokens.flatten(1), tables.embedding)
    context = drafter.hidden_norm(drafter.fc(taps))
    context_positions = torch.arange(longest).expand(count, -1)
    slot_positions = position.flatten(1)
    for layer in drafter.layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        both = torch.cat([context, normed], 1)
        query = attention.q_norm(attention.q_proj(normed).view(count, slots, -1, shape.head_dim))
        key = attention.k_norm(attention.k_proj(both).view(count, longest + slots, -1, shape.head_dim))
        value = attention.v_proj(both).view(count, longest + slots, -1, shape.head_dim)
        query = rotate(query, slot_positions, shape.rope_theta)
        key = rotate(key, torch.cat([context_positions, slot_positions], 1), shape.rope_theta)
        seen_states = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        x = x + attention.o_proj(seen_states.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    hidden = drafter.norm(x)

    logits = functional.linear(hidden, tables.head)
    cross = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    loss = (1 - objective.kl_weight) * cross
    if objective.kl_weight > 0:
        t = objective.kl_temperature
        final = torch.stack([pad(s.states.final, longest) for s in samples if s.states.final is not None])
        before = (inside - 1).clamp(min=0)[..., None].expand(-1, -1, shape.hidden_size)
        target = torch.softmax(functional.linear(final.to(dtype).gather(1, before), tables.head) / t, -1)
        divergence = functional.kl_div(torch.log_softmax(logits / t, -1), target, reduction="none").sum(-1)
        loss = loss + objective.kl_weight * t**2 * divergence
    weights = torch.exp(-(torch.arange(slots) % size - 1) / objective.gamma) * valid
    total = (loss * weights).sum() / weights.sum()
    total.backward()
    return total.detach()


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [N, T, heads, d] at positions [N, T]; cosines in the dtype of x, as usual in eager code."""
    width = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2) / width)
    angles = (positions[..., None] * frequencies)[:, :, None]
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
