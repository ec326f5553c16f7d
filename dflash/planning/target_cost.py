"""What running the target costs, from its shapes: parameters, FLOPs, bytes of weights and cache.

Counts matrix products and attention, which are all but a percent or two of a transformer's work;
norms, activations and rotary embeddings are left out. A multiply-add is two FLOPs.
"""

from dataclasses import dataclass

from dflash.model.facts import TargetFacts

_BYTES = 2  # bf16
_CHUNK = 64
_STATE_BYTES = 4  # recurrent states are kept in fp32


@dataclass(frozen=True)
class TargetCost:
    """A target's cost. Parameters are counts; the rest are per token or per sequence."""

    embedding_parameters: int
    head_parameters: int
    layer_parameters: int
    """All decoder layers, all experts."""
    active_layer_parameters: int
    """What one token passes through."""
    attention_flops_per_pair: int
    """FLOPs per (token, visible token), over all layers with attention."""
    recurrent_flops_per_token: int
    """FLOPs of the recurrent states' updates and reads, over all linear layers: while decoding."""
    chunked_flops_per_token: int
    """The same in a prefill, which works in chunks of 64 tokens: more arithmetic, in large products."""
    cache_bytes_per_token: int
    """Keys and values of one token, over all layers that keep them."""
    state_bytes_per_sequence: int
    """Recurrent states of one sequence, whatever its length."""

    @property
    def parameters(self) -> int:
        """All parameters; tied tables count once."""
        return self.embedding_parameters + self.head_parameters + self.layer_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in bf16."""
        return _BYTES * self.parameters

    def prefill_flops(self, tokens: int, *, head: bool = False) -> float:
        """FLOPs of one forward over a sequence of `tokens`, with or without the head's logits."""
        pairs = tokens * (tokens + 1) / 2
        active = self.active_layer_parameters + (self.head_parameters or self.embedding_parameters) * head
        return (
            2.0 * active * tokens
            + self.attention_flops_per_pair * pairs
            + self.chunked_flops_per_token * tokens
        )

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes read from memory to decode one token for each of `batch` sequences of mean length `context`.

        Dense weights are read once; of the experts, those that any sequence chose (an upper bound:
        all of them), since with many sequences nearly all are chosen.
        """
        head = self.head_parameters or self.embedding_parameters
        share = min(1.0, batch * self.active_layer_parameters / self.layer_parameters)
        layers = max(share * self.layer_parameters, self.active_layer_parameters)
        per_sequence = context * self.cache_bytes_per_token + self.state_bytes_per_sequence
        return _BYTES * (layers + head) + batch * per_sequence


def target_cost(facts: TargetFacts, layers: int | None = None) -> TargetCost:
    """The cost of a target, or of its first `layers` layers when hidden states end there."""
    kinds = facts.layer_kinds[: layers if layers is not None else facts.layers]
    table = facts.vocab_size * facts.hidden_size
    full = sum(kind != "linear_attention" for kind in kinds)
    linear = len(kinds) - full
    mlp, active_mlp = _mlp_parameters(facts, len(kinds))
    attention = full * _attention_parameters(facts) + linear * _linear_parameters(facts)
    return TargetCost(
        embedding_parameters=table,
        head_parameters=0 if facts.tied else table,
        layer_parameters=attention + mlp,
        active_layer_parameters=attention + active_mlp,
        attention_flops_per_pair=full * _flops_per_pair(facts),
        recurrent_flops_per_token=linear * _recurrent_flops(facts),
        chunked_flops_per_token=linear * (_recurrent_flops(facts) + _chunk_flops(facts)),
        cache_bytes_per_token=full * _cache_bytes(facts),
        state_bytes_per_sequence=linear * _state_bytes(facts),
    )


def _attention_parameters(facts: TargetFacts) -> int:
    d, h = facts.hidden_size, facts.heads
    if facts.latent is not None:
        m = facts.latent
        head = m.nope_head_dim + m.rope_head_dim
        query = d * m.q_lora_rank + m.q_lora_rank * h * head if m.q_lora_rank else d * h * head
        down = d * (m.kv_lora_rank + m.rope_head_dim)
        up = m.kv_lora_rank * h * (m.nope_head_dim + m.value_head_dim)
        return query + down + up + h * m.value_head_dim * d
    query = d * h * facts.head_dim * (2 if facts.gated_query else 1)
    return query + 2 * d * facts.kv_heads * facts.head_dim + h * facts.head_dim * d


def _linear_parameters(facts: TargetFacts) -> int:
    if facts.linear is None:
        return 0
    d, g = facts.hidden_size, facts.linear
    keys, values = g.key_heads * g.key_head_dim, g.value_heads * g.value_head_dim
    # q, k, v and the output gate z; two gates per value head; the short convolution over q, k, v; output
    return (
        d * (2 * keys + 2 * values) + 2 * d * g.value_heads + (2 * keys + values) * g.conv_kernel + values * d
    )


def _mlp_parameters(facts: TargetFacts, layers: int) -> tuple[int, int]:
    """All and active parameters of the MLPs of the first `layers` layers."""
    d = facts.hidden_size
    dense = 3 * d * facts.intermediate_size
    if facts.moe is None:
        return layers * dense, layers * dense
    m = facts.moe
    sparse = round(layers * m.sparse_layers / facts.layers)
    expert, shared, router = 3 * d * m.intermediate_size, 3 * d * m.shared_intermediate_size, d * m.experts
    rest = (layers - sparse) * dense
    return (
        rest + sparse * (m.experts * expert + shared + router),
        rest + sparse * (m.experts_per_token * expert + shared + router),
    )


def _flops_per_pair(facts: TargetFacts) -> int:
    """Scores and their weighted sum: two products of a head's width each."""
    if facts.latent is not None:
        m = facts.latent
        return 2 * facts.heads * (m.nope_head_dim + m.rope_head_dim + m.value_head_dim)
    return 4 * facts.heads * facts.head_dim


def _recurrent_flops(facts: TargetFacts) -> int:
    """A gated delta rule's step: read the state twice, update it once, each a product with a matrix."""
    if facts.linear is None:
        return 0
    g = facts.linear
    return 6 * g.value_heads * g.key_head_dim * g.value_head_dim


def _chunk_flops(facts: TargetFacts) -> int:
    """Within a chunk: two products of keys, one of values, and two triangular systems (half a product)."""
    if facts.linear is None:
        return 0
    g = facts.linear
    return g.value_heads * _CHUNK * (5 * g.key_head_dim + 3 * g.value_head_dim)


def _cache_bytes(facts: TargetFacts) -> int:
    if facts.latent is not None:
        return _BYTES * (facts.latent.kv_lora_rank + facts.latent.rope_head_dim)
    return 2 * _BYTES * facts.kv_heads * facts.head_dim


def _state_bytes(facts: TargetFacts) -> int:
    if facts.linear is None:
        return 0
    g = facts.linear
    convolution = (2 * g.key_heads * g.key_head_dim + g.value_heads * g.value_head_dim) * (g.conv_kernel - 1)
    return _STATE_BYTES * g.value_heads * g.key_head_dim * g.value_head_dim + _BYTES * convolution
