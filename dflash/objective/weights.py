"""The objective's settings, and the weight of every slot. Weights are constants: no gradient flows.

A slot k = 1..B-1 of a block weighs (base)_k * (streak)_k * valid_k:
  decay    exp(-(k-1) / gamma)
  dpace    sum over m >= k of the product over i <= m of q_i, where q = (1 - alpha) p + alpha and p
           is the drafter's probability of the label; a slot without a label ends every product
  uniform  1
  streak   1 + alpha * (slots 1..k-1 all correct) * (slot k not correct): extra weight on each
           block's first error, the one that ends what the target accepts; a slot without a label
           counts as not correct
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dflash.resource.training import Loss


@dataclass(frozen=True)
class Objective:
    """loss = kl_weight * T^2 * KL(target^T || draft^T) + (1 - kl_weight) * CE, per supervised slot."""

    weights: Literal["decay", "dpace", "uniform"] = "decay"
    gamma: float = 7.0
    dpace_alpha: float = 0.5
    kl_weight: float = 0.7
    kl_temperature: float = 2.0
    streak_alpha: float = 0.5

    @classmethod
    def from_loss(cls, loss: Loss, block_size: int) -> "Objective":
        """Of `spec.training.loss`, with gamma's default for the block size."""
        return cls(
            weights=loss.weights,
            gamma=loss.gamma if loss.gamma is not None else default_gamma(block_size),
            dpace_alpha=loss.dpace_alpha,
            kl_weight=loss.kl_weight,
            kl_temperature=loss.kl_temperature,
            streak_alpha=loss.streak_alpha,
        )


def default_gamma(block_size: int) -> float:
    """4, 5, 7 for blocks of 8, 10, 16, as published; on straight lines between and beyond."""
    if block_size <= 10:
        return block_size / 2
    return float(5 + (block_size - 10) / 3)


def slot_weights(objective: Objective, valid: Tensor, correct: Tensor, probability: Tensor) -> Tensor:
    """fp32 [N, B]. valid, correct: bool [N, B] (correct implies valid); probability of the label [N, B]."""
    size = valid.shape[1]
    if objective.weights == "decay":
        decay = np.exp(-np.maximum(np.arange(size) - 1, 0) / objective.gamma)
        base = torch.from_numpy(decay).to(valid.device, torch.float32).expand(valid.shape)
    elif objective.weights == "dpace":
        smoothed = (1 - objective.dpace_alpha) * probability + objective.dpace_alpha
        reach = (smoothed * valid)[:, 1:].cumprod(1)
        later = reach.flip(1).cumsum(1).flip(1)
        base = torch.cat([torch.zeros_like(later[:, :1]), later], 1)
    else:
        base = torch.ones(valid.shape, device=valid.device)
    first_error = streak_before(correct) * ~correct
    return base * (1 + objective.streak_alpha * first_error) * valid


def streak_before(correct: Tensor) -> Tensor:
    """fp32 [N, B]: 1 where all slots 1..k-1 are correct (so 1 for k = 1), else 0; slot 0 has 0."""
    hits = correct[:, 1:].float().cumprod(1)
    return torch.cat([torch.zeros_like(hits[:, :1]), torch.ones_like(hits[:, :1]), hits[:, :-1]], 1)
