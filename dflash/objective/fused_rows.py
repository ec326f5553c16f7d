"""What happens to a chunk's logits between its two products with the head, written for a compiler.

On a GPU, `torch.compile` makes a few kernels of it, each reading the logits once: reductions for the
statistics, then one pass that writes the gradient. On a CPU `head_loss` has its own tiled passes, which
compiled code does not beat there; both give the same numbers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Of r rows: gradient [r, V] with respect to the logits in their dtype; the rest fp32 or int64 [r].

    winner: the first index of the largest logit. cross_entropy; probability of the label; divergence,
    KL of the teacher from the draft at the temperature (zeros without a teacher).
    """

    gradient: Tensor
    winner: Tensor
    cross_entropy: Tensor
    probability: Tensor
    divergence: Tensor


def rows_of(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    line: Tensor | None,
    *,
    kl_weight: float,
    temperature: float,
) -> Rows:
    """Statistics and gradient of kl_weight T^2 KL(q_T || p_T) + (1 - kl_weight) CE.

    logits [r, V]; labels int64 [r]; teacher [U, V], the teacher's logits, with each row's line of them,
    int64 [r]; both None for cross entropy alone (kl_weight 0).
    """
    draft = logits.float()
    normaliser = torch.logsumexp(draft, 1)
    label_logit = draft.gather(1, labels[:, None]).squeeze(1)
    probabilities = torch.exp(draft - normaliser[:, None])
    here = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradient = (1.0 - kl_weight) * (probabilities - here.float())
    divergence = torch.zeros_like(normaliser)
    if teacher is not None and line is not None:
        softened = draft / temperature
        softened_normaliser = torch.logsumexp(softened, 1)
        target = teacher.float() / temperature
        target_normaliser = torch.logsumexp(target, 1)
        shares = torch.exp(target - target_normaliser[:, None])
        negative_entropy = (shares * target).sum(1) - target_normaliser
        of_rows = shares[line]
        divergence = negative_entropy[line] - (softened * of_rows).sum(1) + softened_normaliser
        gradient = gradient + kl_weight * temperature * (
            torch.exp(softened - softened_normaliser[:, None]) - of_rows
        )
    return Rows(
        gradient.to(logits.dtype),
        draft.argmax(1),
        normaliser - label_logit,
        torch.exp(label_logit - normaliser),
        divergence,
    )


@functools.cache
def compiled() -> Callable[..., Rows]:
    """`rows_of` as kernels; made at first use."""
    # Else torch goes on eagerly with one warning: several times the memory and the time.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    function: Callable[..., Rows] = torch.compile(rows_of)
    return function
