"""What the planner knows: the spec, what is committed, what runs, and what it wrote down before.

Plain frozen data. An observer must look in this order: children first, the store second. Then a child
that is seen to have ended with success has its commit in view too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from dflash.resource.drafter import DrafterSpec
from dflash.resource.hashes import StageHashes

Role = Literal["generate", "target", "drafter", "evaluate"]
Stage = Literal["generation", "training", "evaluation"]
State = Literal["pending", "running", "stopping", "succeeded", "failed"]

ROLES: tuple[Role, ...] = ("generate", "target", "drafter", "evaluate")
STAGES: tuple[Stage, ...] = ("generation", "training", "evaluation")
STAGE_OF: dict[Role, Stage] = {
    "generate": "generation",
    "target": "training",
    "drafter": "training",
    "evaluate": "evaluation",
}


def hash_of(role: Role, hashes: StageHashes) -> str:
    """The output a role works on."""
    return {
        "generate": hashes.dataset,
        "target": hashes.drafter,
        "drafter": hashes.drafter,
        "evaluate": hashes.evaluation,
    }[role]


@dataclass(frozen=True)
class Child:
    """One process or pod, alive or ended."""

    id: str
    """Unique to this incarnation: a pod's uid, a process's number and start time."""
    role: Role
    hash: str
    index: int
    state: State
    attempt: int = 0
    """The drafter group's attempt; 0 for the other roles."""
    world: int = 1
    """Size of the group it was started in."""
    created_at: float = 0.0
    ended_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    """CamelCase: OOMKilled, Evicted, Unschedulable, ImagePullBackOff, ... or empty."""
    message: str = ""
    disrupted: bool = False
    """Ended by the platform (eviction, preemption, a lost node), not by itself."""
    node: str = ""

    @property
    def live(self) -> bool:
        """It may still be computing."""
        return self.state in ("pending", "running", "stopping")


@dataclass(frozen=True)
class Committed:
    """What the store says is done for the hashes asked for."""

    dataset: bool = False
    export: bool = False
    evaluation: bool = False
    attempt: int = -1
    """Highest attempt seen in this drafter's checkpoints and heartbeat; -1 when there is none."""
    gate: str = ""
    """Why the evaluation's gate refuses the drafter; empty when it passes."""
    promoted: bool = False
    """This evaluation's drafter is the one promoted under the resource's name."""
    acceptance_length: float | None = None

    def has(self, stage: Stage) -> bool:
        """The stage's output is committed, whoever made it."""
        return {"generation": self.dataset, "training": self.export, "evaluation": self.evaluation}[stage]


@dataclass(frozen=True)
class StageProgress:
    """The progress object of the stage that runs, as far as decisions depend on it."""

    attempt: int
    done: float
    moved_at: float
    """When `done` last changed, as the observer saw it (Unix time)."""


@dataclass(frozen=True)
class Failure:
    """What went wrong last: it outlives the process that failed."""

    role: Role
    index: int
    attempt: int
    reason: str
    message: str
    exit_code: int | None
    node: str
    at: float


@dataclass(frozen=True)
class RoleRecord:
    """What the planner wrote down about one role's work on one output, before acting on it."""

    hash: str
    attempt: int = 0
    launched_at: float | None = None
    """When the attempt's creation was decided; None while it waits for the last one to be gone."""
    restarts: int = 0
    disruptions: int = 0
    streak: int = 0
    """Failures in a row without progress between them: sets the backoff."""
    done_at_failure: float = 0.0
    not_before: float = 0.0
    stalled: str = ""
    """Reason for which nothing more is tried until the spec changes; empty while work goes on."""
    committed_at: float | None = None
    """When the stage's output was first seen to be committed."""
    counted: frozenset[str] = frozenset()
    """Ids of ended children that are accounted for."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Record:
    """All that must outlive the planner's process. It is stored before actions are carried out."""

    spec: str = ""
    """Digest of the whole spec that budgets were spent under: another spec has fresh budgets."""
    roles: Mapping[Role, RoleRecord] = field(default_factory=dict)

    def with_role(self, role: Role, record: RoleRecord) -> Self:
        """The same record with one role's part replaced."""
        return replace(self, roles={**self.roles, role: record})


@dataclass(frozen=True)
class Observed:
    """One look at the world."""

    name: str
    spec: DrafterSpec
    hashes: StageHashes
    committed: Committed
    children: tuple[Child, ...]
    record: Record
    now: float
    progress: Mapping[Stage, StageProgress] = field(default_factory=dict)
    suggested_targets: int | None = None
    """What the bottleneck verdict asks for; used when `training.targets` is auto."""
