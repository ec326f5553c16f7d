"""What a target process sends for one sample. Not for: how it travels (`dflash.channel`)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class States:
    """Hidden states of one sample of T tokens.

    taps: [T, K*D] in the target's dtype; tap i in columns i*D .. (i+1)*D, in the order asked for.
        Tap k is the output of the target's 0-based layer k, before any later norm.
    final: [T, D] after the target's final norm, or None where it was not asked for.
    """

    taps: Tensor
    final: Tensor | None = None
