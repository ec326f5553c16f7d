"""The objective written slowly in float64, slot by slot, from its definition; autograd does the rest.

A yardstick for tests: full logits, Python loops, nothing shared with `dflash.objective`.
"""

import math

import torch
from torch import Tensor


def naive_weights(objective, valid: Tensor, correct: Tensor, probability: Tensor) -> Tensor:
    """[N, B] weights, by loops."""
    blocks, size = valid.shape
    out = torch.zeros(blocks, size, dtype=torch.float64)
    for n in range(blocks):
        streak = 1.0
        for k in range(1, size):
            hit = bool(valid[n, k]) and bool(correct[n, k])
            if valid[n, k]:
                if objective.weights == "decay":
                    base = math.exp(-(k - 1) / objective.gamma)
                elif objective.weights == "uniform":
                    base = 1.0
                else:
                    base = 0.0
                    for m in range(k, size):
                        product = 1.0
                        for i in range(1, m + 1):
                            a = objective.dpace_alpha
                            q = (1 - a) * float(probability[n, i]) + a
                            product *= q if valid[n, i] else 0.0
                        base += product
                out[n, k] = base * (1 + objective.streak_alpha * streak * (0.0 if hit else 1.0))
            streak *= 1.0 if hit else 0.0
    return out


def naive_loss(hidden: Tensor, head: Tensor, labels, teacher, valid: Tensor, objective):
    """Sum of w L and sum of w, with CE and KL per slot.

    hidden [N, B, D] float64 with a graph; labels[n][k]; teacher[n][k] a final state [D], where valid.
    """
    blocks, size, _ = hidden.shape
    cross, divergence = {}, {}
    correct = torch.zeros(blocks, size, dtype=torch.bool)
    probability = torch.zeros(blocks, size, dtype=torch.float64)
    t = objective.kl_temperature
    for n in range(blocks):
        for k in range(size):
            if not valid[n, k]:
                continue
            logits = head @ hidden[n, k]
            log_p = torch.log_softmax(logits, 0)
            cross[n, k] = -log_p[labels[n][k]]
            correct[n, k] = int(logits.argmax()) == labels[n][k]
            probability[n, k] = log_p[labels[n][k]].exp().detach()
            if objective.kl_weight > 0:
                log_q = torch.log_softmax(head @ teacher[n][k] / t, 0)
                log_p_t = torch.log_softmax(logits / t, 0)
                divergence[n, k] = (log_q.exp() * (log_q - log_p_t)).sum()
    weights = naive_weights(objective, valid, correct, probability)
    total = hidden.sum() * 0.0
    for at, ce in cross.items():
        kl = divergence.get(at, 0.0)
        total = total + weights[at] * (objective.kl_weight * t**2 * kl + (1 - objective.kl_weight) * ce)
    parts = (
        sum(weights[at] * ce.detach() for at, ce in cross.items()),
        sum(weights[at] * kl.detach() for at, kl in divergence.items()),
    )
    return total, weights, correct, parts
