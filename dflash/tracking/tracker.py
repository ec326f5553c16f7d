"""The one object that training and evaluation log to: metrics.jsonl and W&B side by side."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dflash import layout
from dflash.resource.storage import Tracking
from dflash.tracking.jsonl import JsonlMetrics, Row
from dflash.tracking.wandb_run import WandbRun

if TYPE_CHECKING:
    from dflash.storage.store import Store

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"


class Tracker:
    """Rows of metrics on the axis `global_step`. Use as a context manager, or `finish()` in a finally.

    Once open, no method raises for anything that goes wrong outside this process or waits on W&B.
    """

    def __init__(self, jsonl: JsonlMetrics, wandb: WandbRun | None) -> None:
        self._jsonl = jsonl
        self._wandb = wandb

    @classmethod
    def open(
        cls,
        spec: Tracking,
        *,
        name: str,
        run_hash: str,
        config: Mapping[str, Any],
        folder: Path,
        store: "Store | None" = None,
        attempt: int = 0,
        step: int = 0,
    ) -> Self:
        """Start, or go on from `step`, the step of the checkpoint that this attempt resumes from.

        `name` is the Drafter's, `run_hash` the drafter stage's hash: all attempts of it are one W&B
        run and one metrics.jsonl, in `folder` and (with `store`) in the drafter's folder there.
        """
        jsonl = JsonlMetrics(
            folder / FILE, store=store, key=layout.drafter(run_hash, FILE), attempt=attempt, step=step
        )
        wandb = None
        if spec.wandb.enabled:
            wandb = WandbRun(
                spec.wandb,
                run_id=f"dflash-{run_hash}",
                name=f"{name}-{run_hash[:8]}",
                config=config,
                folder=folder,
                earlier=list(jsonl.rows),
                store=store,
                key=layout.drafter(run_hash, "wandb/"),
            )
        tracker = cls(jsonl, wandb)
        if step or attempt:
            tracker.event(f"restart: attempt {attempt} goes on from step {step}")
        return tracker

    @property
    def earlier(self) -> list[Row]:
        """Rows of the attempts before this one, up to the step that it goes on from."""
        return self._jsonl.rows

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics at `step`. Names with a slash are grouped by W&B: `train/loss`."""
        row = self._jsonl.append(step, metrics)
        if self._wandb is not None:
            self._wandb.log(row)

    def event(self, text: str) -> None:
        """Mark something at the highest step of any row: a restart, an early stop."""
        row = self._jsonl.event(text)
        if self._wandb is not None:
            self._wandb.log(row)

    def finish(self) -> None:
        """Close both, each within about a minute whatever the network does."""
        try:
            self._jsonl.finish()
        finally:
            if self._wandb is not None:
                self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
