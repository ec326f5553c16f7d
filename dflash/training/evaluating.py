"""What rank 0 does about measured acceptance: asks, tells, keeps the best checkpoint, may end the run.

The rules are in `measured`, the exchange with target 0 in `measurements`. Nothing here waits but `choose`,
at the end of the run.
"""

import logging
from collections.abc import Callable

from dflash.errors import Preempted
from dflash.resource.training import TrainingEvaluation
from dflash.tracking import Tracker
from dflash.training.checkpoints import Checkpoints
from dflash.training.measured import Measured, best, chosen, due, early_stop
from dflash.training.measurements import Measurements

log = logging.getLogger(__name__)

_LENGTH = "eval/acceptance_length"


class Evaluating:
    """Called after every step. `figures` are for the heartbeat, from any thread."""

    def __init__(
        self,
        spec: TrainingEvaluation,
        steps: int,
        measurements: Measurements,
        checkpoints: Checkpoints,
        tracker: Tracker,
    ) -> None:
        """`steps` is the length of the whole run. What attempts before measured counts like this one's."""
        self._spec, self._steps = spec, steps
        self._measurements, self._checkpoints, self._tracker = measurements, checkpoints, tracker
        self.figures: dict[str, float | str] = {}
        self.ending = ""
        """Why the run should end now; empty to go on."""
        logged = {row["global_step"] for row in tracker.earlier if _LENGTH in row}
        for found in measurements.history:
            if found.step not in logged:
                self._log(found)
        self._judge()

    def after_step(self) -> None:
        """Tell what has been measured, and ask for the next checkpoint when one is due."""
        heard, asked = self._take(), self._ask()
        if heard or asked:
            self._judge()

    def _ask(self) -> bool:
        committed, asked = self._checkpoints.committed, self._measurements
        if committed is None or asked.waiting or self.ending:
            return False
        if not due(self._spec, committed.step, asked.asked_step, asked.seconds_since_asked):
            return False
        asked.ask(committed)
        return True

    def choose(self, stopping: Callable[[], bool]) -> Measured | None:
        """At the end, the last checkpoint committed: which one to export in its place; None for that one.

        Waits until the last checkpoint is measured, for `waitSeconds` at most. Raises Preempted when
        `stopping` says so before that: the next attempt goes on from here.
        """
        last = self._checkpoints.committed
        if not self._spec.best_checkpoint or last is None:
            return None
        if not any(m.step == last.step for m in self._measurements.history):
            self._measurements.ask(last)
        if not self._measurements.wait_for(last.step, self._spec.wait_seconds, stopping):
            if stopping():
                raise Preempted("stopped before the export, with the last checkpoint committed")
            text = (
                f"the last checkpoint was not measured within {self._spec.wait_seconds} s, so it is exported "
                "unmeasured; see target 0's log, or raise training.evaluation.waitSeconds"
            )
            log.warning("%s", text)
            self._tracker.event(text)
        self._take()
        self._judge()
        found = chosen(self._spec, self._measurements.history, last.step)
        if found is not None:
            text = (
                f"the checkpoint of step {found.step} is exported: it accepts {found.length:.3f} tokens a "
                f"verification, more than that of step {last.step}"
            )
            log.info("%s", text)
            self._tracker.event(text)
        return found

    def summary(self) -> list[dict[str, float]]:
        """All measurements, for the export's record."""
        return [{"step": m.step, "acceptance_length": m.length} for m in self._measurements.history]

    def _take(self) -> bool:
        fresh = self._measurements.take()
        for found in fresh:
            self._log(found)
            log.info("step %d: measured acceptance length %.3f", found.step, found.length)
        return bool(fresh)

    def _log(self, found: Measured) -> None:
        length = found.acceptance_length
        row = {
            _LENGTH: length.pooled,
            "eval/per_response_mean": length.per_response_mean,
            "eval/tokens": found.tokens,
            "eval/verifications": float(length.verifications),
            "eval/seconds": found.seconds,
        }
        if length.pooled_interval is not None:
            row["eval/acceptance_length_low"] = length.pooled_interval.low
            row["eval/acceptance_length_high"] = length.pooled_interval.high
        row |= {f"eval/accepted_slot_{slot}": share for slot, share in enumerate(found.by_slot, 1)}
        self._tracker.log(found.step, row)

    def _judge(self) -> None:
        """Figures, what must be kept, and whether to end, from all that is measured."""
        history = self._measurements.history
        top = best(history)
        if top is not None:
            self.figures = {
                "measured_acceptance_length": history[-1].length,
                "measured_step": float(history[-1].step),
                "best_acceptance_length": top.length,
                "best_step": float(top.step),
            }
        kept = set(self._measurements.open)
        if top is not None and self._spec.best_checkpoint:
            kept.add(top.place)
        self._checkpoints.pinned = frozenset(kept)
        reason = early_stop(self._spec, history, self._steps)
        if reason and not self.ending:
            log.warning("%s", reason)
            self._tracker.event(reason)
            self.ending = reason
        if self.ending:
            self.figures = {**self.figures, "early_stop": self.ending}
