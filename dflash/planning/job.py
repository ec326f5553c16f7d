"""What a plan is for: a declaration, resolved sizes, and what is known of amounts and hardware."""

from dataclasses import dataclass

from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape
from dflash.planning.hardware import Gpu
from dflash.resource.drafter import DrafterSpec


@dataclass(frozen=True)
class Measured:
    """Rates of one GPU that were measured, in tokens per second; they take the place of estimates."""

    generation: float | None = None
    target: float | None = None
    drafter: float | None = None


@dataclass(frozen=True)
class Job:
    """What is planned: the declaration, resolved sizes, and what is known about amounts and hardware.

    answers: prompts times turns that are trained on. price: of one GPU for one hour; None leaves money out.
    network: a pod's, in bytes per second; None when all pods are in one node.
    """

    facts: TargetFacts
    shape: DraftShape
    spec: DrafterSpec
    answers: float
    gpu: Gpu
    price: float | None = None
    network: float | None = None
    measured: Measured | None = None
