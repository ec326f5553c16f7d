"""Keys and values of many sequences of different length, each in its own slot of one buffer.

Slot b holds positions 0..length(b)-1 at its own start, so a finished sequence is replaced by writing the
new one over it, and nobody else's memory moves. The mask hides what is beyond a slot's length. Given to a
transformers model as its cache. Only for layers that keep keys and values.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "grouped_slots"
"""Name under which models are loaded with the attention below (transformers forbids names with `flash`)."""

_FIRST_COLUMNS = 256


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's buffers, [slots, kv heads, columns, head width]."""

    is_sliding = False
    is_compileable = False

    def __init__(self, slots: int, shared: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots
        self.shared = shared
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate like the first states that come."""
        self.keys = self._buffer(key_states, _FIRST_COLUMNS)
        self.values = self._buffer(value_states, _FIRST_COLUMNS)
        self.is_initialized = True

    def _buffer(self, like: Tensor, columns: int) -> Tensor:
        # Zeros, not garbage: a masked weight of 0 times a NaN would still be a NaN.
        return like.new_zeros(self.slots, like.shape[1], columns, like.shape[3])

    def reserve(self, columns: int) -> None:
        """Have room for sequences of this length."""
        assert self.keys is not None
        assert self.values is not None
        have = self.keys.shape[2]
        if columns > have:
            wanted = max(columns, have + have // 2)
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = self._buffer(old, wanted)
                new[:, :, :have] = old
                setattr(self, name, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one position to each of the first n slots; gives views of what they hold."""
        del args, kwargs  # transformers passes them to every kind of layer
        shared = self.shared
        assert self.keys is not None
        assert self.values is not None
        n = key_states.shape[0]
        self.reserve(shared.width)
        self.keys[shared.rows, :, shared.columns] = key_states[:, :, 0]
        self.values[shared.rows, :, shared.columns] = value_states[:, :, 0]
        return self.keys[:n, :, : shared.width], self.values[:n, :, : shared.width]

    def get_seq_length(self) -> int:
        """Length of the longest sequence."""
        return self.shared.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask that transformers would build; ours is given ready-made."""
        del query_length
        return self.shared.width, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1


class SlotCache(Cache):
    """All layers' slots. `place` puts a prefilled sequence in, `advance` says where the next positions go."""

    def __init__(self, layers: int, slots: int, device: torch.device) -> None:
        self.device = device
        self.width = 0
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        self.columns = torch.zeros(0, dtype=torch.int64, device=device)
        self._buffers: list[Any] = [_SlotLayer(slots, self) for _ in range(layers)]
        super().__init__(layers=self._buffers)

    def advance(self, lengths: list[int]) -> None:
        """The next forward appends to slots 0..n-1, whose lengths so far are these."""
        self.rows = torch.arange(len(lengths), device=self.device)
        self.columns = torch.tensor(lengths, device=self.device)
        self.width = max(lengths) + 1

    def mask(self) -> Tensor:
        """bool[n, 1, 1, width]: what each slot's next position sees, itself included."""
        columns = torch.arange(self.width, device=self.device)
        return (columns[None] <= self.columns[:, None])[:, None, None]

    def place(self, slot: int, filled: Any, row: int, length: int) -> None:
        """Copy the first `length` positions of a row of a prefilled DynamicCache into a slot."""
        for layer, source in zip(self._buffers, filled.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            layer.reserve(length)
            layer.keys[slot, :, :length] = source.keys[row, :, :length]
            layer.values[slot, :, :length] = source.values[row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's content to another slot."""
        for layer in self._buffers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]


def _attend(  # noqa: PLR0917 - transformers' interface
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention without repeating keys and values.

    In decoding, the query heads of a group stand in for query positions; they share keys and mask, so the
    result is the same. Prefill is transformers' own.
    """
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] > 1 or groups == 1:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    batch, heads, _, width = query.shape
    grouped = query.view(batch, key.shape[1], groups, width)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
