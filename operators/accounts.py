"""Counts GPU time by stage, and what of it failures wasted, for either executor.

Wasted is what a failure costs: all that the stage holds from the failure until it is further than it had
been before, waiting, start-up and repeated work alike. The arithmetic of projections is in
`dflash.planning.spending`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from dflash.planning.kept import find_warm_up, read_spending, write_spending
from dflash.storage.store import Store
from operators.observed import STAGE_OF, Record, Stage, StageProgress

_SAVE_SECONDS = 10.0


def catching_up(record: Record, stage: Stage, done: float) -> bool:
    """Whether the stage, at `done`, was not yet further than at its last failure.

    Of the look before, so that the time since a failure counts even if all is made good within one look.
    """
    roles = [r for role, r in record.roles.items() if STAGE_OF[role] == stage]
    return any(r.failure is not None and done <= r.done_at_failure for r in roles)


class Accounts:
    """The books of one executor on this machine, all of whose GPUs are paid for while a stage works."""

    def __init__(self, store: Store, name: str) -> None:
        """Goes on from what was counted before."""
        self._store, self._name = store, name
        self.spending = read_spending(store, name)
        self.warm_up = find_warm_up(store, name)
        """What a warm-up measured before this run."""
        self._gpus = float(machine_gpus())
        self._counted_at: float | None = None
        self._saved_at = 0.0
        self._done: dict[Stage, float] = {}

    def look(
        self,
        now: float,
        at_work: set[Stage],
        record: Record,
        progress: Mapping[Stage, StageProgress],
    ) -> None:
        """Count the time since the last look, after which `record` was written down.

        Stages that overlap for a moment share it.
        """
        since, self._counted_at = self._counted_at, now
        elapsed = 0.0 if since is None else max(0.0, now - since)
        for stage in at_work:
            seconds = self._gpus * elapsed / len(at_work)
            wasted = catching_up(record, stage, self._done.get(stage, 0.0))
            self.spending = self.spending.adding(stage, seconds, wasted=wasted)
        self._done = {stage: seen.done for stage, seen in progress.items()}
        held = self._gpus if at_work else 0.0
        self.spending = self.spending.model_copy(update={"gpus": held, "updated_at": now})
        if at_work and now - self._saved_at >= _SAVE_SECONDS:
            self.save(now)

    def save(self, now: float) -> None:
        """Write the books down."""
        self._saved_at = now
        write_spending(self._store, self._name, self.spending)


def visible_gpus() -> list[str]:
    """Names by which processes of this machine may be given its GPUs; none without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def machine_gpus() -> int:
    """GPUs that are paid for; a machine without any counts as one."""
    return max(1, len(visible_gpus()))
