"""`spec.training`: the objective, the optimiser, and how the work is spread over processes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.resource.section import Section, operational


class Loss(Section):
    """The objective. Each improvement over plain cross entropy has its own switch."""

    weights: Literal["decay", "dpace", "uniform"] = Field(
        "decay",
        description=(
            "Slot weights: `decay` is exp(-(k-1)/gamma), `dpace` follows the drafter's own confidence, "
            "`uniform` weighs all slots alike."
        ),
    )
    gamma: float | None = Field(
        None, gt=0.0, le=1000.0, description="Decay constant. Default: 7, 5 or 4 for block sizes 16, 10, 8."
    )
    dpace_alpha: float = Field(0.5, ge=0.0, le=1.0, description="Smoothing of D-PACE's confidences.")
    kl_weight: float = Field(
        0.7, ge=0.0, le=1.0, description="Share of distillation in the loss; 0 is cross entropy alone."
    )
    kl_temperature: float = Field(2.0, gt=0.0, le=20.0, description="Temperature of the distillation.")
    streak_alpha: float = Field(
        0.5,
        ge=0.0,
        le=100.0,
        description="Extra weight of each block's first error, the one that ends the streak; 0 is off.",
    )


class Noise(Section):
    """Gaussian noise on the taps, relative to each tap's RMS, annealed by a cosine."""

    start: float = Field(0.1, ge=0.0, le=10.0, description="Relative std at the first step; 0 is off.")
    end: float = Field(0.01, ge=0.0, le=10.0, description="Relative std at the last step.")


class Checkpoint(Section):
    """When progress is committed, and how much of it is kept."""

    every_steps: int = operational(500, ge=1, le=10_000_000, description="Steps between commits.")
    every_minutes: float = operational(
        10.0, gt=0.0, le=1440.0, description="Commit at least this often, whichever comes first."
    )
    keep: int = operational(3, ge=1, le=1000, description="Newest checkpoints kept; older ones are deleted.")


class EarlyStop(Section):
    """When measured acceptance ends a run before its last step. Both rules are off by default."""

    min_acceptance_length: float | None = Field(
        None, ge=1.0, le=64.0, description="End the run when less is measured, once it is `after` done."
    )
    after: float = Field(
        0.25, ge=0.0, le=1.0, description="Share of the steps before which a low figure ends nothing."
    )
    patience: int = Field(
        0, ge=0, le=1000, description="Measurements in a row without a new best that end the run; 0 is never."
    )


class TrainingEvaluation(Section):
    """Acceptance measured while training, on held-out prompts, against the target's own greedy answers.

    Off by default. Target 0 answers the prompts once, before it serves, and then measures the newest
    committed checkpoint whenever one is due, beside serving; drafters never wait for it but at the end.
    """

    every_steps: int = Field(
        0, ge=0, le=10_000_000, description="Steps between measured checkpoints; 0 is not by steps."
    )
    every_minutes: float = Field(
        0.0, ge=0.0, le=10_080.0, description="Minutes between measured checkpoints; 0 is not by time."
    )
    samples: int = Field(16, ge=1, le=256, description="Most prompts of each evaluation set.")
    max_tokens: int = Field(128, ge=2, le=4096, description="Most tokens in one answer.")
    best_checkpoint: bool = Field(
        True, description="Export the checkpoint with the most measured acceptance; false is the last one."
    )
    stop: EarlyStop = Field(EarlyStop(), description="Ending a run early.")
    wait_seconds: int = operational(
        600, ge=0, le=3600, description="Longest wait at the end for the last checkpoint's measurement."
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is ever measured."""
        return self.every_steps > 0 or self.every_minutes > 0.0


class Training(Section):
    """The training stage: targets stream hidden states, drafters learn from them."""

    epochs: int = Field(6, ge=1, le=1000, description="Passes over the dataset.")
    batch_size: int = Field(
        8,
        ge=1,
        le=65_536,
        description="Samples per optimiser step, over all drafters together.",
    )
    anchors: int = Field(512, ge=1, le=8192, description="Most blocks drawn per sample and epoch.")
    max_length: int = Field(
        4096, ge=32, le=10_000_000, description="Longer samples are cut to this many tokens."
    )
    start: Literal["random", "target"] = Field(
        "random",
        description=(
            "Initial weights: random, or the target's last layers, which need the drafter's sizes; "
            "with few prompts that learns several times faster."
        ),
    )
    learning_rate: float = Field(6e-4, gt=0.0, le=1.0, description="Peak learning rate of AdamW.")
    warmup: float = Field(0.04, ge=0.0, lt=1.0, description="Share of the steps that warm up linearly.")
    min_learning_rate_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="Where the cosine ends, as a share of the peak."
    )
    weight_decay: float = Field(0.0, ge=0.0, le=1.0, description="AdamW's weight decay, matrices only.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas.")
    clip: float = Field(1.0, gt=0.0, le=1e6, description="Largest norm of the gradient.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the weights, order, anchors and noise.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute precision; master weights are always fp32."
    )
    loss: Loss = Field(Loss(), description="The objective.")
    noise: Noise = Field(Noise(), description="Noise on the taps.")
    targets: int | Literal["auto"] = operational(
        1, description="Target processes (pods). `auto` lets the operator follow the bottleneck verdict."
    )
    target_devices: int = operational(
        1,
        ge=1,
        le=64,
        description=(
            "GPUs of one target process, over which the target's layers are split where it is too large for "
            "one. Must divide its attention heads and key-value heads."
        ),
    )
    min_targets: int = operational(1, ge=1, le=4096, description="Least targets under `auto`.")
    max_targets: int = operational(8, ge=1, le=4096, description="Most targets under `auto`.")
    drafters: int = operational(1, ge=1, le=4096, description="Drafter processes (pods), one group.")
    queue_depth: int = operational(
        60, ge=1, le=100_000, description="Samples requested or ready per drafter: bounds memory."
    )
    micro_batch_tokens: int = operational(
        16_384, ge=32, le=10_000_000, description="Most context tokens packed in one forward of the drafter."
    )
    target_batch_tokens: int = operational(
        16_384, ge=32, le=10_000_000, description="Most tokens packed in one forward of the target."
    )
    backend: Literal["auto", "nccl", "gloo"] = operational(
        "auto", description="Transport of hidden states and gradients: nccl on GPUs, gloo on CPUs."
    )
    checkpoint: Checkpoint = operational(Checkpoint(), description="Checkpoints.")
    evaluation: TrainingEvaluation = Field(
        TrainingEvaluation(), description="Acceptance measured while training."
    )
    max_restarts: int = operational(
        10, ge=0, le=10_000, description="Attempts lost to errors before the Drafter is Stalled."
    )
    max_disruptions: int = operational(
        1000, ge=0, le=1_000_000, description="Attempts lost to preemption, eviction and lost nodes."
    )
    startup_deadline_seconds: int = operational(
        1800, ge=10, le=86_400, description="Longest time from creation to the first step."
    )
    progress_deadline_seconds: int = operational(
        900, ge=10, le=86_400, description="Longest time without a step before an attempt is replaced."
    )
    target_wait_seconds: int = operational(
        600, ge=5, le=86_400, description="Longest time a drafter waits with no live target (then exit 75)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        stop = self.evaluation.stop
        if not self.evaluation.enabled and (stop.min_acceptance_length is not None or stop.patience):
            raise ValueError(
                "evaluation.stop needs measurements: set evaluation.everySteps or evaluation.everyMinutes"
            )
        if self.evaluation.enabled and self.evaluation.wait_seconds >= self.progress_deadline_seconds:
            raise ValueError(
                f"evaluation.waitSeconds {self.evaluation.wait_seconds} must be below "
                f"progressDeadlineSeconds {self.progress_deadline_seconds}, or a run would be replaced while "
                "it waits at its end"
            )
        if self.evaluation.enabled and self.target_devices > 1:
            raise ValueError(
                "evaluation while training needs a target on one device: set targetDevices to 1, or "
                "evaluation.everySteps and evaluation.everyMinutes to 0"
            )
        if isinstance(self.targets, int) and not 1 <= self.targets <= 4096:
            raise ValueError(f"targets {self.targets} must be 1 to 4096, or `auto`")
        if self.min_targets > self.max_targets:
            raise ValueError(f"minTargets {self.min_targets} is above maxTargets {self.max_targets}")
        if self.drafters > self.batch_size:
            raise ValueError(
                f"drafters {self.drafters} is above batchSize {self.batch_size}: some would never have a "
                "sample; raise batchSize"
            )
        return self
