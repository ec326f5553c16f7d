"""What a Drafter has spent so far, what of it was wasted, and where time and money will end. Pure.

Spending is counted by whoever runs the stages (`operators.accounts`) in seconds of GPUs held, start-up and
waiting included, and kept in the store as `spending/<name>.json`, over all edits and reruns of the Drafter.
Money is a product, never kept: `spec.tracking.gpuHourPrice` may change at any time.
"""

from dataclasses import dataclass

from pydantic import Field

from dflash.planning.warm_up import WarmUp
from dflash.progress import Progress
from dflash.resource.section import Section

STAGES = ("generation", "training", "evaluation")


class StageSpending(Section):
    """Of one stage, over all its attempts."""

    gpu_seconds: float = Field(0.0, ge=0.0, description="GPU time held.")
    wasted_gpu_seconds: float = Field(
        0.0,
        ge=0.0,
        description="Of it, from a failure until the stage was further than it had been before.",
    )


class Spending(Section):
    """Of one Drafter."""

    stages: dict[str, StageSpending] = Field({}, description="By name of the stage.")
    gpus: float = Field(0.0, ge=0.0, description="GPUs held at the last look.")
    updated_at: float = Field(0.0, description="Unix time of the last look.")

    @property
    def gpu_seconds(self) -> float:
        """Of all stages."""
        return sum(stage.gpu_seconds for stage in self.stages.values())

    @property
    def wasted_gpu_seconds(self) -> float:
        """Of all stages."""
        return sum(stage.wasted_gpu_seconds for stage in self.stages.values())

    def adding(self, stage: str, gpu_seconds: float, *, wasted: bool) -> "Spending":
        """The same with more GPU time held by a stage."""
        before = self.stages.get(stage, StageSpending())
        after = StageSpending(
            gpu_seconds=before.gpu_seconds + gpu_seconds,
            wasted_gpu_seconds=before.wasted_gpu_seconds + (gpu_seconds if wasted else 0.0),
        )
        return self.model_copy(update={"stages": {**self.stages, stage: after}})


@dataclass(frozen=True)
class Projection:
    """Spent, wasted, and the end. Money is None without a price; the end is None while it is unknown.

    through: the last stage that the end counts in; later ones are counted where a warm-up has measured them.
    """

    spent_gpu_hours: float
    wasted_gpu_hours: float
    gpu_hours: float | None = None
    ends_at: float | None = None
    through: str = ""
    price: float | None = None

    @property
    def spent(self) -> float | None:
        """Money so far."""
        return None if self.price is None else self.spent_gpu_hours * self.price

    @property
    def wasted(self) -> float | None:
        """Money lost by failures, part of what is spent."""
        return None if self.price is None else self.wasted_gpu_hours * self.price

    @property
    def cost(self) -> float | None:
        """Money at the end."""
        if self.price is None or self.gpu_hours is None:
            return None
        return self.gpu_hours * self.price


def project(
    spending: Spending,
    stage: str | None,
    progress: Progress | None,
    *,
    now: float,
    price: float | None = None,
    warm_up: WarmUp | None = None,
) -> Projection:
    """Where it ends if the running stage goes on at its present rate with the GPUs that it holds."""
    spent, wasted = spending.gpu_seconds / 3600, spending.wasted_gpu_seconds / 3600
    soon = _seconds_left(progress, now)
    if stage is None or soon is None:
        return Projection(spent, wasted, price=price)
    gpu_seconds, seconds, through = spending.gpu_seconds + soon * spending.gpus, soon, stage
    for later in STAGES[STAGES.index(stage) + 1 :] if warm_up is not None else ():
        expected = warm_up.stages.get(later) if warm_up is not None else None
        if expected is None:
            break
        seconds, through = seconds + expected.seconds, later
        gpu_seconds += expected.seconds * expected.gpus
    return Projection(spent, wasted, gpu_seconds / 3600, now + seconds, through, price)


def _seconds_left(progress: Progress | None, now: float) -> float | None:
    if progress is None or progress.eta_seconds is None:
        return None
    return max(0.0, progress.eta_seconds - max(0.0, now - progress.updated_at))
