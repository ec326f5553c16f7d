"""What checkpoints accept, as measured while training: when one is due, which is best, when to end. Pure.

Not for measuring (`measuring`, in a target's process), nor for asking for it (`measurements`, rank 0).
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from dflash.evaluation.acceptance import AcceptanceLength
from dflash.resource.training import TrainingEvaluation
from dflash.training.checkpoints import Place


class Measured(BaseModel):
    """What one checkpoint accepts, as kept in the store."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(description="Steps that the checkpoint was trained for.")
    attempt: int = Field(description="The attempt that committed it.")
    tokens: float = Field(description="Context tokens that it was trained on, over all attempts.")
    acceptance_length: AcceptanceLength = Field(description="By each definition, as in a report.")
    by_slot: list[float] = Field(description="Share of verifications that accepted slots 1..B-1.")
    seconds: float = Field(description="What measuring took.")

    @property
    def place(self) -> Place:
        """The checkpoint."""
        return Place(self.step, self.attempt)

    @property
    def length(self) -> float:
        """The figure that decides: pooled, bonus included."""
        return self.acceptance_length.pooled


def due(spec: TrainingEvaluation, committed: int, last: int, seconds: float) -> bool:
    """Whether the checkpoint of step `committed` is to be measured now.

    `last` is the step that was asked for last, `seconds` ago; both count from the start at first.
    """
    if committed <= last:
        return False
    by_steps = spec.every_steps > 0 and committed - last >= spec.every_steps
    return by_steps or (spec.every_minutes > 0.0 and seconds >= 60.0 * spec.every_minutes)


def best(history: Sequence[Measured]) -> Measured | None:
    """The checkpoint that accepts most; of equals the one trained longest."""
    return max(history, key=lambda m: (m.length, m.step), default=None)


def chosen(spec: TrainingEvaluation, history: Sequence[Measured], last: int) -> Measured | None:
    """The checkpoint to export in place of that of step `last`; None for that one.

    Nothing is chosen before the last checkpoint is measured too: what was measured long ago may be the
    best of a few early ones only.
    """
    if not spec.best_checkpoint or not any(m.step == last for m in history):
        return None
    found = best(history)
    return None if found is None or found.step == last else found


def early_stop(spec: TrainingEvaluation, history: Sequence[Measured], steps: int) -> str:
    """Why the run of `steps` steps should end now, in a sentence; empty to go on."""
    if not spec.enabled or not history:
        return ""
    ordered = sorted(history, key=lambda m: m.step)
    last, least = ordered[-1], spec.stop.min_acceptance_length
    if least is not None and last.step >= spec.stop.after * steps and last.length < least:
        return (
            f"ended early at step {last.step} of {steps}: the measured acceptance length is "
            f"{last.length:.2f}, below training.evaluation.stop.minAcceptanceLength {least:g}; "
            "compare it with train/acceptance_length: if that is high, training and serving differ"
        )
    top = best(ordered)
    since = [m for m in ordered if top is not None and m.step > top.step]
    if top is not None and 0 < spec.stop.patience <= len(since):
        return (
            f"ended early at step {last.step} of {steps}: the measured acceptance length has not risen over "
            f"{top.length:.2f}, of step {top.step}, in {len(since)} measurements "
            "(training.evaluation.stop.patience)"
        )
    return ""
