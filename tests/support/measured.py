"""Measurements of checkpoints, made up."""

from dflash.evaluation.acceptance import acceptance_length
from dflash.training.measured import Measured


def measured(step: int, length: float, attempt: int = 0) -> Measured:
    """A checkpoint of `step` that accepts `length` tokens a verification."""
    found = acceptance_length([[2]], [[1]]).model_copy(update={"pooled": length})
    return Measured(
        step=step,
        attempt=attempt,
        tokens=100.0 * step,
        acceptance_length=found,
        by_slot=[0.5],
        seconds=1.0,
    )
