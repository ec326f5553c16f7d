"""The drafter's shape, resolved once from the declaration, the target and its tokenizer. No torch.

Everything that training, export and evaluation must agree on is in `DraftShape`; nothing about it
is guessed later. Conventions: tap k is the output of the target's 0-based layer k; slot k of a
block anchored at position a predicts token a + k; slot 0 holds the anchor and is not supervised.
"""

from dataclasses import dataclass
from typing import Any

from dflash.errors import ConfigurationError
from dflash.model.facts import TargetFacts
from dflash.model.tokenizer import token_in_use
from dflash.resource.model import DraftModel

_HYBRID_HEAD_DIM = 128
_HEAD_STATE, _HEAD_RANK = 1024, 256
"""Domino's published widths; smaller targets have smaller ones."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes and identities of a drafter. `sliding_window` is None when every layer is full.

    `head` names the output head; head_state and head_rank are its widths, 0 where it has none.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    taps: tuple[int, ...]
    target_layers: int
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    tied: bool
    head: str = "dflash"
    head_state: int = 0
    head_rank: int = 0

    @property
    def tap_width(self) -> int:
        """Columns of `States.taps`: taps times hidden size."""
        return len(self.taps) * self.hidden_size


def resolve_shape(model: DraftModel, facts: TargetFacts, tokenizer: Any | None = None) -> DraftShape:
    """Apply the defaults of `spec.drafter` for this target; ConfigurationError names a wrong field."""
    head_dim = model.head_dim or (_HYBRID_HEAD_DIM if facts.hybrid else facts.head_dim)
    heads = model.heads or facts.heads
    kv_heads = model.kv_heads or min(facts.kv_heads, heads)
    if heads % kv_heads:
        raise ConfigurationError(
            f"drafter.kvHeads: {kv_heads} does not divide drafter.heads {heads}; give a divisor of {heads}"
        )
    if head_dim % 2:
        raise ConfigurationError(f"drafter.headDim: {head_dim} is odd; rotary embeddings need an even width")
    layer_types = tuple(model.resolved_layer_types())
    return DraftShape(
        hidden_size=facts.hidden_size,
        layers=model.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=model.intermediate_size or facts.intermediate_size,
        vocab_size=facts.vocab_size,
        block_size=_block_size(model, facts),
        taps=_taps(model, facts),
        target_layers=facts.layers,
        mask_token_id=_mask_token(model, facts, tokenizer),
        rope_theta=model.rope_theta or facts.rope_theta,
        rms_norm_eps=facts.rms_norm_eps,
        max_positions=facts.max_positions,
        layer_types=layer_types,
        sliding_window=model.sliding_window if "sliding_attention" in layer_types else None,
        tied=facts.tied,
        head=model.head,
        head_state=min(_HEAD_STATE, facts.hidden_size) if model.head == "domino" else 0,
        head_rank=min(_HEAD_RANK, facts.hidden_size) if model.head == "domino" else 0,
    )


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers evenly spaced from the second to the third last; for one tap, the middle.

    round(1 + i (L - 4) / (K - 1)), halves to even, as published drafters have it.
    """
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def check_fits(shape: DraftShape, facts: TargetFacts) -> None:
    """Refuse a drafter made for another target; ConfigurationError names the field that differs."""
    for name, ours, theirs in (
        ("hidden_size", shape.hidden_size, facts.hidden_size),
        ("num_target_layers", shape.target_layers, facts.layers),
        ("vocab_size", shape.vocab_size, facts.vocab_size),
    ):
        if ours != theirs:
            raise ConfigurationError(
                f"{name}: the drafter has {ours} but the target {theirs}; use the target it was trained for"
            )
    _check_taps(shape.taps, facts.layers)


def _block_size(model: DraftModel, facts: TargetFacts) -> int:
    if model.block_size > facts.max_positions:
        raise ConfigurationError(
            f"drafter.blockSize: {model.block_size} is longer than the target's context of "
            f"{facts.max_positions}; give 2 to {facts.max_positions}"
        )
    return model.block_size


def _taps(model: DraftModel, facts: TargetFacts) -> tuple[int, ...]:
    if model.taps is not None:
        taps = tuple(model.taps)
        _check_taps(taps, facts.layers)
        return taps
    taps = default_taps(facts.layers, model.tap_count)
    if len(set(taps)) < len(taps) or min(taps) < 0:
        raise ConfigurationError(
            f"drafter.tapCount: {model.tap_count} evenly spaced taps do not fit a target of {facts.layers} "
            f"layers; give drafter.taps, each 0 to {facts.layers - 1}"
        )
    return taps


def _check_taps(taps: tuple[int, ...], layers: int) -> None:
    for tap in taps:
        if not 0 <= tap < layers:
            raise ConfigurationError(
                f"drafter.taps: {tap} is out of range; the target has {layers} layers, "
                f"whose outputs are taps 0 to {layers - 1}"
            )


def _mask_token(model: DraftModel, facts: TargetFacts, tokenizer: Any | None) -> int:
    token = model.mask_token_id
    if token is None and tokenizer is not None:
        token = tokenizer.mask_token_id
        if token is None and len(tokenizer) < facts.vocab_size:
            token = len(tokenizer)
    if token is None:
        raise ConfigurationError(
            "drafter.maskTokenId: the tokenizer has no mask token and the embedding has no row beyond it; "
            "give the id of a special token that text never uses"
        )
    if token >= facts.vocab_size:
        raise ConfigurationError(
            f"drafter.maskTokenId: {token} is not a row of the target's embedding; "
            f"give an unused id of 0 to {facts.vocab_size - 1}"
        )
    reason = token_in_use(tokenizer, token) if tokenizer is not None else None
    if reason is None and token in facts.special_ids:
        reason = "is a begin, end or padding token of the target"
    if reason is not None:
        raise ConfigurationError(
            f"drafter.maskTokenId: {token} {reason}; give a special token that text never uses, "
            "or a row beyond the tokenizer"
        )
    return token
