"""The next token, from each sample's own random numbers, so that company in a batch changes nothing.

A sample's draw at position n is a hash of (seed, n): no generator has a state to save or to share.
Formulas: temperature, then the k likeliest, then the smallest set of those that holds top_p of their
probability. Not for: penalties, grammars or log probabilities.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash.resource.generation import Sampling


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 in [0, 1), one a sample, from SplitMix64's finaliser over (seed, position)."""
    with np.errstate(over="ignore"):
        state = seeds.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64)
        for _ in range(2):
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(
    logits: Tensor, sampling: Sampling, seeds: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64[B], the next token of each row of `logits`[B, V]; `positions` count an answer's tokens."""
    if sampling.temperature == 0.0:
        greedy: NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
        return greedy
    count = logits.shape[-1] if sampling.top_k < 1 else min(sampling.top_k, logits.shape[-1])
    values, tokens = torch.topk(logits, count, dim=-1)  # descending
    probabilities = torch.softmax(values.double() / sampling.temperature, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the first one always stays
    cumulative = probabilities.cumsum(-1)
    draws = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)[:, None] * cumulative[:, -1:]
    place = (cumulative <= draws).sum(-1, keepdim=True).clamp(max=count - 1)
    chosen: NDArray[np.int64] = tokens.gather(-1, place)[:, 0].cpu().numpy()
    return chosen
