"""`status` of a Drafter on a cluster: a cache, for people and tools, of what the store and the pods say.

One pydantic model, from which the CRD's status schema is generated. Strings are cut where they are
made, so a status stays a few KB however long a run is. Not for deciding anything: that is
`operators.plan`, from what is observed.
"""

from typing import Annotated, Literal

from pydantic import Field

from dflash.resource.section import Section

StageName = Literal["generation", "training", "evaluation"]
StageState = Literal["Waiting", "Pending", "Running", "Done", "Stalled", "Suspended"]
Short = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=2048)]


class StageStatus(Section):
    """One stage of the chain."""

    name: StageName = Field(description="generation, training or evaluation.")
    hash: str = Field("", max_length=64, description="Name of the stage's output in the store.")
    state: StageState = Field("Waiting", description="What the stage is doing.")
    gpu_seconds: int = Field(
        0, ge=0, description="GPU time spent by its pods so far, lost attempts included."
    )
    wasted_gpu_seconds: int = Field(
        0, ge=0, description="Of it, from a failure until the stage was further than it had been before."
    )


class ProgressStatus(Section):
    """How far the running stage is, copied from the store."""

    summary: str = Field("", max_length=64, description="For the printer column, such as 42 % or 120/400.")
    message: str = Field("", max_length=256, description="What is being done now.")
    done: int = Field(0, ge=0, description="Units done.")
    total: int = Field(0, ge=0, description="Units in all; 0 while unknown.")
    unit: str = Field("", max_length=32, description="prompts, steps or answers.")
    eta_seconds: int | None = Field(None, ge=0, description="Seconds to the end of the stage.")
    updated_at: str = Field("", max_length=64, description="When the job wrote this.")
    figures: dict[str, Short] = Field({}, max_length=64, description="Loss, accuracy, rates: as text.")


class FailureStatus(Section):
    """The last thing that went wrong; it outlives the pod."""

    reason: str = Field(
        "", max_length=64, description="OOMKilled, Evicted, ConfigurationError, ImagePullBackOff, ..."
    )
    role: str = Field("", max_length=32, description="Which kind of process.")
    index: int | None = Field(None, ge=0, description="Its index.")
    attempt: int | None = Field(None, ge=0, description="The attempt, in training.")
    exit_code: int | None = Field(None, description="Exit code of its container.")
    node: str = Field("", max_length=253, description="Where it ran.")
    message: str = Field("", max_length=2048, description="What it said last, and what to do.")
    time: str = Field("", max_length=64, description="When it was seen.")


class ArtifactStatus(Section):
    """The drafter that was made."""

    uri: str = Field("", max_length=2048, description="Folder of the exported drafter.")
    promoted: bool = Field(False, description="Whether the promotion gate let it through.")


class CostStatus(Section):
    """GPU-hours, and money where `spec.tracking.gpuHourPrice` is given; as text with two decimals."""

    spent_gpu_hours: str = Field("", max_length=32, description="So far, all stages and attempts.")
    wasted_gpu_hours: str = Field("", max_length=32, description="Of these, lost by failures.")
    projected_gpu_hours: str = Field("", max_length=32, description="At the end, at the present rate.")
    spent: str = Field("", max_length=32, description="Money so far.")
    wasted: str = Field("", max_length=32, description="Of it, lost by failures.")
    projected: str = Field("", max_length=32, description="Money at the end.")
    ends_at: str = Field("", max_length=64, description="When the end is expected, to the minute.")
    through: str = Field(
        "",
        max_length=32,
        description="The last stage counted in; later ones are known where a warm-up has measured them.",
    )


class Condition(Section):
    """A Kubernetes condition."""

    type: str = Field(min_length=1, max_length=316, description="Accepted, Ready, ...")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(min_length=1, max_length=1024, description="Why, in one CamelCase word.")
    message: str = Field("", max_length=4096, description="Why, in a sentence.")
    last_transition_time: str = Field("", max_length=64, description="When `status` last changed.")
    observed_generation: int = Field(0, ge=0, description="Generation of the spec that this is about.")


class DrafterStatus(Section):
    """What `kubectl get` and `kubectl describe` show."""

    observed_generation: int = Field(0, ge=0, description="Generation of the spec that was last acted on.")
    stage: str = Field("", max_length=32, description="The stage at work, or done.")
    phase: str = Field(
        "",
        max_length=32,
        description=(
            "Queued (no room), Pending (not started), Generating, Training, Evaluating, Promoting, Ready, "
            "Suspended or Stalled."
        ),
    )
    message: str = Field("", max_length=2048, description="What goes on, in a sentence.")
    stages: list[StageStatus] = Field([], max_length=3, description="The chain.")
    attempt: int = Field(0, ge=0, description="The training attempt at work, counted from 0.")
    restarts: int = Field(0, ge=0, description="Attempts lost to errors.")
    disruptions: int = Field(0, ge=0, description="Attempts lost to preemption, eviction and lost nodes.")
    progress: ProgressStatus = Field(ProgressStatus(), description="The running stage.")
    acceptance_length: str = Field("", max_length=32, description="Measured by the evaluation.")
    alerts: list[Annotated[str, Field(max_length=512)]] = Field(
        [], max_length=16, description="What is wrong with the running stage, and what to do."
    )
    verdict: str = Field("", max_length=1024, description="Where the bottleneck of training is.")
    cost: CostStatus = Field(CostStatus(), description="What was spent, and what it will be.")
    artifact: ArtifactStatus = Field(ArtifactStatus(), description="The drafter that was made.")
    last_failure: FailureStatus | None = Field(None, description="The last thing that went wrong.")
    gpu_accounted_at: str = Field("", max_length=64, description="Until when stages[].gpuSeconds counts.")
    record: str = Field(
        "",
        max_length=32_768,
        description="The operator's own memory of attempts and budgets. Not an interface.",
    )
    conditions: list[Condition] = Field([], max_length=12, description="Conditions, kstatus's among them.")
