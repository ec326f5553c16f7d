"""What one training step of a drafter costs, from shapes alone: FLOPs and bytes. No torch.

FLOPs count the multiply-adds of matrix products, two each, forward and backward, as
`torch.utils.flop_counter` does; everything else is bandwidth. The backward of a trained product is two
products of the same size (of its input and of its weight); the frozen head has one, and `fc`, whose
input is data, has one. Bytes say what memory a step needs, by purpose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash.model.shape import DraftShape

_MASTER_BYTES = 16
"""Per parameter: fp32 master, fp32 gradient and AdamW's two fp32 moments."""


@dataclass(frozen=True)
class StepCost:
    """One forward and backward. FLOPs by part, and their sum; bytes by purpose.

    state_bytes: parameters, gradients and moments, in fp32. table_bytes: embedding and head (once where
    tied). activation_bytes: what the forward keeps for the backward, an estimate. scratch_bytes: the
    chunked head's buffers.
    """

    context_flops: int
    layer_flops: int
    attention_flops: int
    head_flops: int
    teacher_flops: int
    state_bytes: int
    table_bytes: int
    activation_bytes: int
    scratch_bytes: int

    @property
    def flops(self) -> int:
        """All of them."""
        return (
            self.context_flops
            + self.layer_flops
            + self.attention_flops
            + self.head_flops
            + self.teacher_flops
        )

    @property
    def bytes(self) -> int:
        """Memory while the step runs."""
        return self.state_bytes + self.table_bytes + self.activation_bytes + self.scratch_bytes


def parameter_count(shape: DraftShape) -> int:
    """Trained parameters: 58 tensors for five layers."""
    width = shape.hidden_size
    layer = _layer_weights(shape) + 2 * width + 2 * shape.head_dim
    corrected = 0
    if shape.head_state:
        corrected = 3 * shape.head_state * (width + shape.head_state)
        corrected += shape.head_rank * (width + shape.head_state + shape.vocab_size)
    return shape.tap_width * width + 2 * width + shape.layers * layer + corrected


def step_cost(
    shape: DraftShape,
    *,
    context: int,
    blocks: int,
    rows: int,
    seen: Sequence[int],
    teacher_rows: int = 0,
    chunk_rows: int = 128,
    bytes_per_value: int = 2,
) -> StepCost:
    """Cost of a packed batch.

    context: tokens S; blocks: N; rows: supervised slots R; seen: context tokens that each block sees on
    a full layer (its anchor), N of them; teacher_rows: positions U whose teacher distribution is
    computed (0 without distillation); chunk_rows: rows of logits alive at once.
    """
    width, size = shape.hidden_size, shape.block_size
    keys = shape.kv_heads * shape.head_dim
    slots = blocks * size
    context_products = 2 * 2 * context * shape.tap_width * width
    context_products += shape.layers * 3 * 2 * context * width * 2 * keys
    attention = 0
    for layer_type in shape.layer_types:
        window = shape.sliding_window if layer_type == "sliding_attention" else None
        pairs = sum(size * ((anchor if window is None else min(anchor, window)) + size) for anchor in seen)
        attention += 3 * 2 * 2 * shape.heads * shape.head_dim * pairs
    head = 2 * rows * width * shape.vocab_size
    tables = (1 if shape.tied else 2) * shape.vocab_size * width * bytes_per_value
    return StepCost(
        context_flops=context_products,
        layer_flops=shape.layers * 3 * 2 * slots * _layer_weights(shape),
        attention_flops=attention,
        head_flops=2 * head,
        teacher_flops=2 * teacher_rows * width * shape.vocab_size,
        state_bytes=_MASTER_BYTES * parameter_count(shape),
        table_bytes=tables,
        activation_bytes=_activation_values(shape, context, slots) * bytes_per_value,
        scratch_bytes=(4 if teacher_rows else 2) * chunk_rows * shape.vocab_size * bytes_per_value,
    )


def _layer_weights(shape: DraftShape) -> int:
    """Weights of one layer's seven matrices."""
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden_size * (2 * query + 2 * keys + 3 * shape.intermediate_size)


def _activation_values(shape: DraftShape, context: int, slots: int) -> int:
    """Values kept for the backward: per slot and layer the inputs of each product and norm."""
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    per_slot = 4 * shape.hidden_size + 4 * query + 4 * keys + 4 * shape.intermediate_size
    per_token = 4 * keys * shape.layers + shape.tap_width + 2 * shape.hidden_size
    return slots * (shape.layers * per_slot + 2 * shape.hidden_size) + context * per_token
