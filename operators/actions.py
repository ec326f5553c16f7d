"""What the planner can ask an executor to do. Each is idempotent: doing it twice is doing it once."""

from dataclasses import dataclass

from operators.observed import Child, Role


@dataclass(frozen=True)
class Start:
    """Bring up the given indexes of a role; those that live already are left alone.

    On a cluster: make sure the role's Service and Job for this hash (and attempt) exist, with
    `world` completions. For drafters the indexes are always the whole group.
    """

    role: Role
    hash: str
    attempt: int
    indexes: tuple[int, ...]
    world: int


@dataclass(frozen=True)
class StopGroup:
    """End every child of a role, hash and attempt, gracefully, and remove what recreates them."""

    role: Role
    hash: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class StopChild:
    """End one child of an elastic role: there are more than are wanted."""

    child: Child
    reason: str


@dataclass(frozen=True)
class Promote:
    """Point promoted/<name>.json at this drafter, by compare-and-swap."""

    name: str
    drafter: str
    evaluation: str


@dataclass(frozen=True)
class Wait:
    """Nothing to do before `until` (Unix time), or before something changes when it is None."""

    until: float | None
    reason: str
    """CamelCase name of what is waited for."""
    message: str


Action = Start | StopGroup | StopChild | Promote | Wait
