"""What rank 0 does between steps: metrics, the heartbeat's figures, alarms, and periodic checkpoints.

Figures are read from the device once a tracking interval, in one transfer, or when a checkpoint needs
the counts. Not for writing them: that is `dflash.tracking`, `heartbeat` and `checkpoints`.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflash.channel.interface import ClientStats
from dflash.channel.verdict import judge
from dflash.errors import DflashError
from dflash.model.mask import compilations
from dflash.objective.step import StepSums
from dflash.planning.alerts import Alert, Surroundings
from dflash.progress import Progress
from dflash.resource.training import Training
from dflash.tracking import Tracker
from dflash.training.alarms import Alarms
from dflash.training.auto_targets import AutoTargets
from dflash.training.checkpoints import Checkpoints
from dflash.training.evaluating import Evaluating
from dflash.training.figures import objective_metrics
from dflash.training.optimizer import FlatOptimizer
from dflash.training.outlook import Outlook
from dflash.training.schedule import learning_rate, noise_std
from dflash.training.trainer import Trainer

log = logging.getLogger(__name__)

_ALARM_SHARE = 0.01
"""Of steps or samples without any anchor: beyond it the data is not what was meant."""
_LOST_SHARE, _LOST_LEAST = 0.01, 3
"""Samples whose states no target could give: so many are left out, and more end the run."""
_SCHEDULE_REPORTS = 12
_PASSING = ("stop", "end", "incomplete", "gradient_norm")
"""Of a step's numbers, those whose total over a run says nothing."""
_SHOWN = ("loss", "accuracy", "acceptance_length", "streak")


@dataclass(frozen=True)
class Run:
    """The constants of a run that figures are made from."""

    training: Training
    steps: int
    attempt: int
    world: int
    interval_seconds: float
    dropped_share: float | None = None
    """Of the dataset's answers, those that its gate dropped."""
    cost_limit: float | None = None


@dataclass
class _Waits:
    """How long each side waited, over all intervals of an attempt."""

    seconds: float = 0.0
    waited: float = 0.0
    idle_seconds: float = 0.0
    idle: float = 0.0

    def add(self, seconds: float, wait_share: float, idle_share: float | None) -> None:
        self.seconds += seconds
        self.waited += wait_share * seconds
        if idle_share is not None:
            self.idle_seconds += seconds
            self.idle += idle_share * seconds

    @property
    def wait_share(self) -> float | None:
        return self.waited / self.seconds if self.seconds else None

    @property
    def idle_share(self) -> float | None:
        return self.idle / self.idle_seconds if self.idle_seconds else None


class _Timetable:
    """How long steps took since the first report, which start-up delays, and how long they should have.

    Says nothing for the first reports: a few steps' time is no rate.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._first_step = self._reports = 0

    def elapsed(self, step: int) -> float | None:
        """Seconds. Called once a report."""
        if self._since is None:
            self._since, self._first_step = time.monotonic(), step
        self._reports += 1
        return time.monotonic() - self._since if self._reports > _SCHEDULE_REPORTS else None

    def planned(self, step: int, outlook: Outlook | None) -> float | None:
        """Seconds at the rate that a warm-up reached."""
        rate = outlook.steps_per_second if outlook is not None else None
        return None if rate is None else (step - self._first_step) / rate


class Reporter:
    """Called after every step. `counts` are totals over all attempts; `progress` can be shown any time."""

    def __init__(
        self,
        run: Run,
        tracker: Tracker,
        checkpoints: Checkpoints,
        optimizer: FlatOptimizer,
        channel: Callable[[], ClientStats],
        *,
        step: int,
        counts: Mapping[str, float],
        store_seconds: Callable[[], float | None],
        evaluating: Evaluating | None = None,
        outlook: Outlook | None = None,
    ) -> None:
        """`store_seconds` is what a small request takes; `evaluating` is None where nothing is measured."""
        self.counts: Counter[str] = Counter(counts)
        self.metrics: dict[str, float] = {}
        self._run, self._tracker, self._checkpoints, self._optimizer = run, tracker, checkpoints, optimizer
        self._channel, self._store_seconds, self.evaluating = channel, store_seconds, evaluating
        self._outlook, self._timetable = outlook, _Timetable()
        self._sums: StepSums | None = None
        self._interval: Counter[str] = Counter()
        self._began, self._first_step = time.monotonic(), step
        self._before = channel()
        self._saved_step, self._saved_at = step, time.monotonic()
        self._alarms = Alarms(tracker.earlier)
        self._whole = _Waits()
        self._auto = AutoTargets(run.training.min_targets, run.training.max_targets)
        self._progress = Progress(
            stage="training",
            message="starting",
            done=step,
            total=run.steps,
            unit="steps",
            attempt=run.attempt,
        )

    def progress(self) -> Progress:
        """The newest snapshot, with how the channel is now. From any thread."""
        channel, progress = self._channel(), self._progress
        live = sum(target.live for target in channel.targets)
        now = {"targets": float(live), "queue_depth": float(channel.depth)}
        measured = self.evaluating.figures if self.evaluating else {}
        figures = {**progress.figures, **measured, **now}
        message = progress.message if live or progress.message == "exporting" else channel.status
        return progress.model_copy(update={"figures": figures, "message": message})

    def after_step(self, trainer: Trainer) -> None:
        """Whatever is due at this boundary. Errors: those of a checkpoint's upload."""
        self._checkpoints.check()
        self._progress = self._progress.model_copy(
            update={"done": float(trainer.step), "message": "training"}
        )
        now = time.monotonic()
        if now - self._began >= self._run.interval_seconds:
            self.report(trainer)
        checkpoint = self._run.training.checkpoint
        due = (
            trainer.step - self._saved_step >= checkpoint.every_steps
            or now - self._saved_at >= 60.0 * checkpoint.every_minutes
        )
        if due and not self._checkpoints.busy:
            self.save(trainer)
        if self.evaluating is not None:
            self.evaluating.after_step()

    @property
    def ending(self) -> bool:
        """Whether measurements say that the run should end now."""
        return self.evaluating is not None and bool(self.evaluating.ending)

    def save(self, trainer: Trainer) -> None:
        """Start a checkpoint of the present step."""
        trainer.settle()
        self._read(trainer)
        self._saved_step, self._saved_at = trainer.step, time.monotonic()
        self._checkpoints.save(
            trainer.step, self.counts, self._optimizer.weights_on_host(), self._optimizer.moments_on_host()
        )

    def report(self, trainer: Trainer) -> None:
        """One row of metrics for the time since the last, and the figures of the heartbeat."""
        self._read(trainer)
        now = time.monotonic()
        seconds, steps = max(now - self._began, 1e-9), trainer.step - self._first_step
        if self._sums is None or steps <= 0:
            return
        metrics = {
            **objective_metrics(self._sums),
            **self._schedule(trainer.step),
            **self._speed(seconds, steps),
            **self._channel_metrics(seconds),
            "train/gradient_norm": self._gradient_norm(steps),
            "progress/step": float(trainer.step),
            "progress/share": trainer.step / self._run.steps,
            # Of a sample's supervised tokens, how many a visit trains: anchors are budgeted per sample.
            "train/coverage": self._interval["coverage"] / max(1.0, self._interval["samples"]),
            "drafter/compilations": float(compilations()),
            "progress/samples": self.counts["samples"],
            "progress/skipped_steps": self.counts["skipped"],
            "progress/steps_without_anchor": self.counts["weightless"],
            "progress/lost_samples": self.counts["lost_samples"],
        }
        if self._outlook is not None:
            left = (self._run.steps - trainer.step) * seconds / steps
            metrics |= self._outlook.metrics(
                Progress(stage="training", eta_seconds=left, updated_at=time.time())
            )
        self._tracker.log(trainer.step, metrics)
        self.metrics = metrics
        self._alarm(trainer.step, metrics)
        self._whole.add(seconds, metrics["drafter/wait_share"], metrics.get("target/idle_share"))
        rate = steps / seconds
        figures: dict[str, float | str] = {
            name: metrics[f"train/{name}"] for name in _SHOWN if f"train/{name}" in metrics
        }
        figures |= {name.split("/")[1]: value for name, value in self._schedule(trainer.step).items()}
        figures |= {
            "tokens_per_second": metrics["drafter/tokens_per_second"],
            "samples_per_second": metrics["drafter/samples_per_second"],
            "drafter_wait_share": metrics["drafter/wait_share"],
        }
        if "target/idle_share" in metrics:
            figures["target_idle_share"] = metrics["target/idle_share"]
        targets, idle = int(metrics["target/live"]), metrics.get("target/idle_share")
        wait = metrics["drafter/wait_share"]
        verdict = judge(targets, self._run.world, idle, wait)
        figures["verdict"], figures["bottleneck"] = verdict.sentence, verdict.bottleneck
        self._auto.see(now, targets, idle, wait)
        if self._auto.wanted is not None:
            figures["wanted_targets"] = float(self._auto.wanted)
        self._progress = self._progress.model_copy(
            update={
                "rate": rate,
                "eta_seconds": (self._run.steps - trainer.step) / rate,
                "figures": figures,
                "alerts": self._alarms.sentences,
            }
        )
        log.info(
            "step %d of %d: loss %.4f, acceptance length %.3f, %.2f steps/s",
            trainer.step,
            self._run.steps,
            metrics.get("train/loss", float("nan")),
            metrics.get("train/acceptance_length", float("nan")),
            rate,
        )
        self._sums, self._interval = None, Counter()
        self._began, self._first_step = now, trainer.step

    def conclude(self) -> str:
        """The verdict over this attempt as a whole, also noted among the metrics."""
        targets = int(self.metrics.get("target/live", 0))
        verdict = judge(targets, self._run.world, self._whole.idle_share, self._whole.wait_share).sentence
        log.info("%s", verdict)
        self._tracker.event(verdict)
        return verdict

    def say(self, message: str) -> None:
        """Show what is done now."""
        self._progress = self._progress.model_copy(update={"message": message})

    def _read(self, trainer: Trainer) -> None:
        sums, counts = trainer.read_totals()
        self._sums = sums if self._sums is None else self._sums + sums
        self._interval.update(counts)
        self.counts.update({name: counts[name] for name in counts if name not in _PASSING})
        lost, trained = self.counts["lost_samples"], self.counts["samples"]
        if counts["lost_samples"] and lost > max(_LOST_LEAST, _LOST_SHARE * trained):
            causes = "; ".join(f"{text} ({n})" for text, n in Counter(self._channel().causes).most_common(3))
            raise DflashError(
                f"no target could give the hidden states of {lost:.0f} samples, {trained:.0f} were trained; "
                f"causes seen by rank 0: {causes or 'none'}; look at the targets' logs"
            )

    def _schedule(self, step: int) -> dict[str, float]:
        last = max(0, step - 1)
        return {
            "train/learning_rate": learning_rate(self._run.training, last, self._run.steps),
            "train/noise_std": noise_std(self._run.training, last, self._run.steps),
        }

    def _gradient_norm(self, steps: int) -> float:
        """Mean over the interval's steps that were trained, before clipping; NaN without one."""
        trained = steps - self._interval["skipped"] - self._interval["weightless"]
        return self._interval["gradient_norm"] / trained if trained > 0 else math.nan

    def _speed(self, seconds: float, steps: int) -> dict[str, float]:
        return {
            "drafter/tokens_per_second": self._interval["tokens"] / seconds,
            "drafter/samples_per_second": self._interval["samples"] / seconds,
            "drafter/steps_per_second": steps / seconds,
            "drafter/wait_share": min(1.0, self._interval["wait_seconds"] / seconds / self._run.world),
        }

    def _channel_metrics(self, seconds: float) -> dict[str, float]:
        """Of this rank's channel: what the targets deliver, and how full it is."""
        now, before = self._channel(), self._before
        self._before = now
        metrics = {
            "channel/depth": float(now.depth),
            "channel/ready": float(now.ready),
            "channel/bytes_per_second": (now.bytes_received - before.bytes_received) / seconds,
            "channel/reissued": float(now.reissued),
            "channel/links_lost": float(now.links_lost),
            "channel/bad_replies": float(now.bad_replies),
            "target/live": float(sum(target.live for target in now.targets)),
            "target/samples_per_second": (now.delivered - before.delivered) / seconds,
        }
        idle = [target.idle_share for target in now.targets if target.live and target.idle_share is not None]
        if idle:
            metrics["target/idle_share"] = sum(idle) / len(idle)
        return metrics

    def _alarm(self, step: int, row: Mapping[str, float]) -> None:
        """Say what is newly wrong: in the log, among the metrics, and in the heartbeat while it lasts."""
        checkpoint = self._run.training.checkpoint
        pace = row["drafter/steps_per_second"]
        around = Surroundings(
            dropped_share=self._run.dropped_share,
            checkpoint_age_seconds=time.monotonic() - self._checkpoints.committed_at,
            # Never more often than once a step.
            checkpoint_every_seconds=max(
                min(60.0 * checkpoint.every_minutes, checkpoint.every_steps / pace), 1.0 / pace
            ),
            store_seconds=self._store_seconds(),
            elapsed_seconds=self._timetable.elapsed(step),
            planned_seconds=self._timetable.planned(step, self._outlook),
        )
        for alert in self._alarms.see(row, around, [*self._without_anchor(step), *self._too_dear(row)]):
            log.warning("%s", alert.sentence)
            self._tracker.event(alert.sentence)

    def _too_dear(self, row: Mapping[str, float]) -> list[Alert]:
        limit, cost = self._run.cost_limit, row.get("cost/projected")
        if limit is None or cost is None or cost <= limit:
            return []
        return [
            Alert(
                "cost-limit",
                f"the end is projected to have cost {cost:,.2f}, and tracking.costLimit is {limit:,.2f}; "
                "follow the bottleneck's advice, raise the limit, or suspend the Drafter",
            )
        ]

    def _without_anchor(self, step: int) -> list[Alert]:
        shares = {
            "steps": self.counts["weightless"] / step,
            "samples": self.counts["unanchored_samples"] / max(1.0, self.counts["samples"]),
        }
        return [
            Alert(
                f"{what}-without-anchor",
                f"{share:.1%} of the {what} have no anchor; look at the answers' lengths in the dataset",
            )
            for what, share in shares.items()
            if share > _ALARM_SHARE
        ]
