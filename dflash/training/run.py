"""The drafter side of the training stage, from a declaration to a committed export.

Cheap checks come first, then the group meets, then what is heavy is loaded. Rank 0 alone writes to
the run's folder. The export's COMMIT marks the stage as done, before anything is torn down.
"""

import logging
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch

from dflash import layout
from dflash.channel.client import HiddenStateClient
from dflash.channel.interface import Identity, Timeouts
from dflash.channel.keys import KeyPair
from dflash.channel.members import MemberDirectory
from dflash.data.dataset import Dataset
from dflash.errors import DflashError, Preempted, TemporaryError
from dflash.model.checkpoint import check_export, export_files
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape, resolve_shape
from dflash.model.source import fingerprint, model_folder
from dflash.model.target import load_tables
from dflash.model.tokenizer import load_tokenizer
from dflash.model.warm_start import start_from_target
from dflash.objective.weights import Objective
from dflash.resource import Drafter
from dflash.storage.commit import read_commit, write_commit
from dflash.storage.location import location_of
from dflash.storage.store import Corrupt, NotFound, Store
from dflash.tracking import Tracker
from dflash.training.checkpoints import Checkpoints, load_weights
from dflash.training.control import Control
from dflash.training.device import device_of
from dflash.training.evaluating import Evaluating
from dflash.training.feed import Feed
from dflash.training.figures import SumsLayout
from dflash.training.group import Group
from dflash.training.heartbeat import Heartbeat
from dflash.training.measured import early_stop
from dflash.training.measurements import Measurements
from dflash.training.optimizer import FlatOptimizer
from dflash.training.order import Order
from dflash.training.outlook import Outlook
from dflash.training.reporter import Reporter, Run
from dflash.training.samples import TrainingSet
from dflash.training.trainer import Learner, Outcome, Trainer
from dflash.training.versions import check_versions, own_versions, publish_versions

log = logging.getLogger(__name__)

_TEARDOWN_SECONDS = 15.0
_EXPORT_SECONDS = 1800.0
_STOPPED_SECONDS = 600.0


@dataclass(frozen=True)
class Part:
    """Which share of which run is this process's."""

    dataset: str
    run: str
    attempt: int
    rank: int
    world: int
    rendezvous: str
    folder: Path
    """Where metrics are kept on this machine; W&B's offline runs are sent from there."""


@dataclass(frozen=True)
class Plan:
    """What the declaration means for this target; the same in every process of the run."""

    facts: TargetFacts
    shape: DraftShape
    identity: Identity


@dataclass(frozen=True)
class _Start:
    """Where an attempt goes on, the same in every rank."""

    step: int = 0
    counts: Mapping[str, float] = field(default_factory=dict)
    ended: bool = False
    """Whether measurements have ended the run at this step."""


def plan_of(resource: Drafter) -> Plan:
    """Resolve the drafter's shape and what targets and drafters must agree on. Loads no weights."""
    spec = resource.spec
    folder = model_folder(spec.target.model, spec.target.revision)
    facts = TargetFacts.from_folder(folder)
    tokenizer = load_tokenizer(spec.target.model, spec.target.revision)
    shape = resolve_shape(spec.drafter, facts, tokenizer)
    identity = Identity(
        fingerprint=fingerprint(folder),
        taps=shape.taps,
        hidden_size=facts.hidden_size,
        dtype=spec.target.dtype,
        final=spec.training.loss.kl_weight > 0.0,
    )
    return Plan(facts, shape, identity)


def train(resource: Drafter, part: Part, control: Control) -> None:
    """Train this rank's share to the end of the run, resuming what earlier attempts committed.

    Returns once the export is committed. Raises Preempted when asked to stop, with a checkpoint
    committed, and TemporaryError when a peer, the targets or the store are lost.
    """
    store = Store.open(location_of(resource.spec.storage))
    if read_commit(store, layout.export(part.run)) is not None:
        log.info("run %s is exported already", part.run)
        return
    with ExitStack() as stack:
        _Rank(resource, part, control, store, stack).train()


class _Rank:
    """One rank's life; its parts are made in `train` in the order in which they are needed."""

    def __init__(
        self, resource: Drafter, part: Part, control: Control, store: Store, stack: ExitStack
    ) -> None:
        self._resource, self._part, self._control = resource, part, control
        self._spec, self._training = resource.spec, resource.spec.training
        self._store, self._stack = store, stack
        self._first = part.rank == 0

    def train(self) -> None:
        training, part = self._training, self._part
        dataset = self._stack.enter_context(Dataset.open(self._store, part.dataset))
        plan = plan_of(self._resource)
        training_set = TrainingSet(dataset, training.max_length, plan.facts.vocab_size)
        order = Order(len(training_set), training.batch_size, training.epochs, training.seed)
        device = device_of(training.backend)
        group = self._join(device)
        learner = self._learner(plan, device)
        identity = {
            "dataset": part.dataset,
            "target": plan.identity.fingerprint,
            "samples": len(training_set),
            "batch_size": training.batch_size,
            "epochs": training.epochs,
            "seed": training.seed,
            "shape": asdict(plan.shape),
        }
        checkpoints = Checkpoints(
            self._store, part.run, part.attempt, keep=training.checkpoint.keep, identity=identity
        )
        measurements = self._measurements()
        start = self._resume(checkpoints, group, learner.optimizer, measurements, order.steps)
        step = start.step
        client = self._connect(plan, device)
        feed = Feed(client.stream, training_set, order, rank=part.rank, world=part.world, first_step=step)
        self._stack.callback(feed.close)
        reporter = None
        if self._first:
            tracker = self._tracker(step)
            evaluating = None
            if measurements is not None:
                evaluating = Evaluating(training.evaluation, order.steps, measurements, checkpoints, tracker)
            heartbeat = Heartbeat(self._store, part.run)
            outlook = Outlook(self._store, self._resource)
            self._stack.callback(outlook.close)
            reporter = Reporter(
                self._constants(dataset, order),
                tracker,
                checkpoints,
                learner.optimizer,
                client.stats,
                step=step,
                counts=start.counts,
                store_seconds=lambda: heartbeat.store_seconds,
                evaluating=evaluating,
                outlook=outlook,
            )
            heartbeat.start(reporter.progress)
            self._stack.callback(heartbeat.stop)
        trainer = Trainer(
            training,
            learner,
            group,
            order,
            feed,
            step=step,
            stop=self._control.stopping.is_set,
            end=lambda: reporter is not None and reporter.ending,
            after_step=reporter.after_step if reporter else lambda _: None,
        )
        log.info(
            "rank %d of %d, attempt %d: %d samples, step %d of %d",
            part.rank,
            part.world,
            part.attempt,
            len(training_set),
            step,
            order.steps,
        )
        # A run that measurements ended stays ended, also when its export was not committed in time.
        outcome = Outcome.DONE if start.ended else trainer.run()
        self._control.commit_begins()
        if outcome is Outcome.STOPPED:
            self._stopped(trainer, group, checkpoints, reporter)
        if reporter is not None:
            reporter.report(trainer)
            reporter.say("exporting")
            reporter.save(trainer)
            checkpoints.finish()
            drafter, exported = self._chosen(plan, learner.drafter, reporter, trainer.step)
            self._export(plan, drafter, reporter, trainer.step, exported)
        group.barrier("exported", _EXPORT_SECONDS)
        self._control.commit_ends()
        _bounded(group.leave, "leaving the group")

    def _constants(self, dataset: Dataset, order: Order) -> Run:
        dropped = sum(dataset.manifest.dropped.values())
        return Run(
            self._training,
            order.steps,
            self._part.attempt,
            self._part.world,
            self._spec.tracking.interval_seconds,
            dropped_share=dropped / max(1, dropped + len(dataset)),
            cost_limit=self._spec.tracking.cost_limit,
        )

    def _measurements(self) -> Measurements | None:
        """What checkpoints were measured to accept, where that is asked for. Rank 0 only."""
        if not (self._first and self._training.evaluation.enabled):
            return None
        measurements = Measurements(self._store, self._part.run)
        self._stack.callback(measurements.close)
        return measurements

    def _join(self, device: torch.device) -> Group:
        part, training = self._part, self._training
        group = Group(
            part.rank,
            part.world,
            part.rendezvous,
            backend="nccl" if device.type == "cuda" else "gloo",
            join_seconds=float(training.startup_deadline_seconds),
            # A rank may wait for targets as long as it is allowed to, while the others wait for it.
            collective_seconds=float(
                max(training.progress_deadline_seconds, training.target_wait_seconds + 60)
            ),
            on_lost=lambda sentence: self._control.give_up(TemporaryError(sentence)),
        )
        shared = orjson.dumps(own_versions()).decode() if self._first else None
        check_versions(orjson.loads(group.share("versions", shared, 60.0)), "rank 0")
        if self._first:
            publish_versions(self._store, part.run)
        return group

    def _learner(self, plan: Plan, device: torch.device) -> Learner:
        training = self._training
        target = self._spec.target
        tables = load_tables(target.model, target.revision, training.dtype, device)
        drafter = DFlashDrafter(plan.shape, training.seed)
        if training.start == "target":
            start_from_target(drafter, target.model, target.revision)
        drafter.to(device)
        optimizer = FlatOptimizer(
            drafter,
            training,
            sums=SumsLayout(plan.shape.block_size).size,
            dtype=getattr(torch, training.dtype),
        )
        objective = Objective.from_loss(training.loss, plan.shape.block_size)
        return Learner(drafter, tables, objective, optimizer, device)

    def _resume(
        self,
        checkpoints: Checkpoints,
        group: Group,
        optimizer: FlatOptimizer,
        measurements: Measurements | None,
        steps: int,
    ) -> _Start:
        """Rank 0 restores what is committed; the others get it from rank 0."""
        start = _Start()
        if self._first:
            checkpoints.claim()
            restored = checkpoints.restore()
            if restored is not None:
                optimizer.restore(restored.weights, restored.moments)
                history = measurements.history if measurements else []
                ended = bool(early_stop(self._training.evaluation, history, steps))
                start = _Start(restored.state.step, dict(restored.state.counts), ended)
                log.info("resumed from %s", restored.place.folder(self._part.run))
        seconds = float(self._training.startup_deadline_seconds)
        shared = orjson.dumps(asdict(start)).decode() if self._first else None
        start = _Start(**orjson.loads(group.share("start", shared, seconds)))
        group.broadcast(optimizer.state_tensors())
        optimizer.refresh()
        return start

    def _connect(self, plan: Plan, device: torch.device) -> HiddenStateClient:
        part, training = self._part, self._training
        directory = MemberDirectory(self._store, part.run)
        keys = KeyPair.generate()
        member = directory.publish(
            "drafter", part.rank, keys, attempt=part.attempt, fingerprint=plan.identity.fingerprint
        )
        self._stack.callback(lambda: _bounded(lambda: directory.withdraw(member), "withdrawing"))
        client = HiddenStateClient(
            directory.targets,
            plan.identity,
            run=part.run,
            attempt=part.attempt,
            index=part.rank,
            keys=keys,
            queue_depth=training.queue_depth,
            backend=training.backend,
            device=device,
            timeouts=Timeouts(no_target=float(training.target_wait_seconds)),
        )
        self._stack.callback(lambda: _bounded(client.close, "closing the channel"))
        return client

    def _tracker(self, step: int) -> Tracker:
        tracker = Tracker.open(
            self._spec.tracking,
            name=self._resource.metadata.name,
            run_hash=self._part.run,
            config=self._spec.model_dump(mode="json", by_alias=True),
            folder=self._part.folder,
            store=self._store,
            attempt=self._part.attempt,
            step=step,
        )
        return self._stack.enter_context(tracker)

    def _stopped(
        self, trainer: Trainer, group: Group, checkpoints: Checkpoints, reporter: Reporter | None
    ) -> None:
        """Commit where the group stopped; every rank leaves once that is done."""
        if reporter is not None:
            reporter.report(trainer)
            reporter.save(trainer)
            checkpoints.finish()
        group.barrier("stopped", _STOPPED_SECONDS)
        self._control.commit_ends()
        _bounded(group.leave, "leaving the group")
        raise Preempted(f"stopped after step {trainer.step}, with a checkpoint committed")

    def _chosen(
        self, plan: Plan, last: DFlashDrafter, reporter: Reporter, step: int
    ) -> tuple[DFlashDrafter, int]:
        """The drafter to export and the step it is of: the last, or one that was measured to be better."""
        found = None
        if reporter.evaluating is not None:
            reporter.say("measuring the last checkpoint")
            found = reporter.evaluating.choose(self._control.stopping.is_set)
            reporter.say("exporting")
        if found is None:
            return last, step
        try:
            _, weights = load_weights(self._store, self._part.run, found.place)
        except (NotFound, Corrupt) as error:
            log.error("the best checkpoint cannot be had, the last is exported: %s", error)
            return last, step
        best = DFlashDrafter(plan.shape)
        best.load_state_dict(weights)
        return best, found.step

    def _export(
        self, plan: Plan, drafter: DFlashDrafter, reporter: Reporter, steps: int, exported: int
    ) -> None:
        """Write the drafter in the format that engines load, check what was written, commit it."""
        evaluating = reporter.evaluating
        files = export_files(drafter, plan.shape, plan.facts)
        with tempfile.TemporaryDirectory(prefix="dflash-export-") as folder:
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            check_export(Path(folder), drafter, plan.facts)
            write_commit(
                self._store,
                layout.export(self._part.run),
                {name: Path(folder, name) for name in files},
                {
                    "run": self._part.run,
                    "dataset": self._part.dataset,
                    "target": plan.identity.fingerprint,
                    "attempt": self._part.attempt,
                    "steps": steps,
                    "exported_step": exported,
                    "measured": evaluating.summary() if evaluating else [],
                    "ended_early": evaluating.ending if evaluating else "",
                    "counts": dict(reporter.counts),
                    "metrics": reporter.metrics,
                    "verdict": reporter.conclude(),
                    "versions": own_versions(),
                },
            )
        log.info("exported the drafter of step %d, after %d steps", exported, steps)


def _bounded(action: Any, what: str) -> None:
    """Tear something down without letting it turn success into a hang or a failure."""

    def body() -> None:
        try:
            action()
        except (DflashError, RuntimeError, OSError) as error:
            log.warning("%s failed: %s", what, error)

    thread = threading.Thread(target=body, name=what, daemon=True)
    thread.start()
    thread.join(_TEARDOWN_SECONDS)
    if thread.is_alive():
        log.warning("%s did not end within %.0f s and is left behind", what, _TEARDOWN_SECONDS)
