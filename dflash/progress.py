"""How far a stage is: one small object in the store, written by the job, read by whoever looks.

`dflash run`, `dflash status` and the operator all read the same object, so they show the same
numbers. Not for metrics over time: that is `dflash.tracking`.
"""

from pydantic import Field

from dflash.resource.section import Section


class Progress(Section):
    """A snapshot of one stage."""

    stage: str = Field(description="generation, training or evaluation.")
    message: str = Field("", description="What is being done now, in a few words.")
    done: float = Field(0.0, description="Units done, over all attempts.")
    total: float = Field(0.0, description="Units in all; 0 while unknown.")
    unit: str = Field("", description="prompts, steps or answers.")
    rate: float = Field(0.0, description="Units per second, lately.")
    eta_seconds: float | None = Field(None, description="Seconds to the end of the stage at that rate.")
    attempt: int = Field(0, description="Attempt that wrote this.")
    updated_at: float = Field(0.0, description="Unix time of writing.")
    alerts: list[str] = Field([], description="What is wrong now and what to do, a sentence each.")
    figures: dict[str, float | str] = Field(
        {}, description="What matters now: loss, accuracy, acceptance_length, tokens_per_second, ..."
    )
