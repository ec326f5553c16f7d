"""Carries the plan out on this machine: jobs as child processes, state in the store, a lock per Drafter.

The loop is observe, plan, write the record down, act; it sleeps until a child ends, a signal comes,
a wait is over, or it is time to read progress again. Whatever it dies in, the next run goes on from
what is committed. Not for showing anything: a `Snapshot` is handed to whoever does.
"""

import fcntl
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import orjson
from pydantic import TypeAdapter

from dflash import layout
from dflash.errors import DflashError, ExitCode, TemporaryError
from dflash.planning.spending import Projection, project
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.resource.hashes import StageHashes
from dflash.resource.load import dump_resource
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import NotFound, Store, to_json
from operators import names
from operators.accounts import Accounts, visible_gpus
from operators.actions import Action, Promote, Start, StopChild, StopGroup
from operators.children import Children
from operators.conditions import Summary, summarize
from operators.observe import Movement, Outputs, committed, progress, suggested_targets, write_inputs
from operators.observed import STAGE_OF, Child, Committed, Observed, Record, Stage, StageProgress
from operators.plan import current_stage, plan, restarted

LOOK_SECONDS = 2.0
"""Between two reads of progress and commits while nothing else happens."""

STORE_PATIENCE = 3.0
"""How long one look may try to reach the store: the loop must go on hearing signals."""


class Command(Protocol):
    """How a job is started: `job_command`, or a stand-in for it in tests."""

    def __call__(  # noqa: D102
        self, action: Start, index: int, port: int, *, resource: Path, hashes: StageHashes
    ) -> list[str]: ...


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Home:
    """Where a Drafter's files on this machine are: the state folder, or .dflash beside its file."""

    folder: Path
    name: str

    @property
    def resource(self) -> Path:
        """The resolved Drafter that jobs read."""
        return self.folder / "run" / self.name / "drafter.json"

    @property
    def logs(self) -> Path:
        """One file per child."""
        return self.folder / "logs" / self.name

    @property
    def report(self) -> Path:
        """The evaluation's files."""
        return self.folder / "reports" / self.name

    @property
    def export(self) -> Path:
        """The trained drafter, ready to serve."""
        return self.folder / "drafters" / self.name

    @property
    def warm_up(self) -> Path:
        """What the last warm-up on this machine measured."""
        return self.folder / "run" / self.name / "warm-up.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One executor per Drafter on this machine; TemporaryError when there is another."""
        path = self.folder / "run" / self.name / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise TemporaryError(
                    f"{self.name} is being run by process {file.read().strip() or 'unknown'} already; "
                    "wait for it or stop it, then run again"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


@dataclass(frozen=True)
class Snapshot:
    """What can be shown after a look."""

    summary: Summary
    stage: Stage | None
    outputs: Outputs
    committed: Committed
    progress: Mapping[Stage, Progress]
    children: tuple[Child, ...]
    record: Record
    logs: Path
    projection: Projection
    trouble: str = ""
    """Why the store cannot be reached just now; empty when it can."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    snapshot: Snapshot | None
    worked: bool
    """Whether anything had to be started."""


class Local:
    """One run of one Drafter on this machine. For the main thread: it takes the signals."""

    def __init__(
        self,
        drafter: Drafter,
        outputs: Outputs,
        store: Store,
        home: Home,
        *,
        environment: Mapping[str, str],
        show: Callable[[Snapshot], None],
        embedded: EmbeddedStore | None = None,
        command: Command | None = None,
    ) -> None:
        """`drafter.spec.storage` must be an s3:// address that `environment` gives access to.

        `store` is asked with little patience; an `embedded` server is started again when it dies.
        """
        self._drafter, self._outputs, self._store, self._home = drafter, outputs, store, home
        self._environment, self._show, self._embedded = dict(environment), show, embedded
        self._command: Command = command or job_command
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._children = Children(lambda: self._wake.put(None))
        self._movement = Movement()
        self._accounts: Accounts | None = None
        self._record = Record()
        self._etag: str | None = None
        self._signal: int | None = None
        self._signals = 0
        self._worked = False
        self._port = 0
        self._described: set[Stage] = set()

    def run(self) -> Outcome:
        """Work until the Drafter is true, stalled, suspended, or a signal comes."""
        _write(self._home.resource, orjson.dumps(dump_resource(self._drafter), option=orjson.OPT_INDENT_2))
        snapshot: Snapshot | None = None
        with self._hearing_signals(), _kept_up(self._embedded):
            try:
                self._load_record()
                while True:
                    try:
                        snapshot, done = self._step(snapshot)
                    except TemporaryError as error:  # the store: children cope for minutes, so do we
                        log.info("%s", error)
                        if snapshot is not None:
                            self._show(replace(snapshot, children=self._children.look(), trouble=str(error)))
                        done, wake_at = False, None
                    else:
                        wake_at = self._wake_at
                    if done or self._signal is not None:
                        break
                    self._sleep(wake_at)
            finally:
                self._children.stop_all(lambda: self._signals > 1)
                if self._accounts is not None:
                    self._accounts.save(time.time())
        if self._signal is not None:
            return Outcome(128 + self._signal, snapshot, self._worked)
        assert snapshot is not None
        return Outcome(_exit_code(snapshot), snapshot, self._worked)

    def _step(self, before: Snapshot | None) -> tuple[Snapshot, bool]:
        """One look and what follows from it; True when there is nothing left to do."""
        seen, shown = self._look(before)
        decided = plan(seen)
        if decided.record != self._record:
            self._save(decided.record)
        for action in decided.actions:
            self._carry_out(action)
        self._wake_at = decided.wake_at
        snapshot = Snapshot(
            summarize(seen, decided),
            current_stage(seen),
            self._outputs,
            seen.committed,
            shown,
            self._children.look(),
            decided.record,
            self._home.logs,
            self._projection(seen, shown),
        )
        self._show(snapshot)
        stalled = snapshot.summary.phase == "Stalled"
        acts = any(isinstance(a, Start | Promote) for a in decided.actions)
        return snapshot, (decided.idle or stalled) and not acts and not any(c.live for c in snapshot.children)

    def _look(self, before: Snapshot | None) -> tuple[Observed, dict[Stage, Progress]]:
        children = self._children.look()  # before the store: see operators.observed
        hashes = self._outputs.hashes
        done = committed(self._store, self._drafter.metadata.name, hashes)
        shown: dict[Stage, Progress] = dict(before.progress) if before else {}
        moved: dict[Stage, StageProgress] = {}
        at_work = {STAGE_OF[c.role] for c in children if c.live}
        outputs: dict[Stage, str] = {
            "generation": hashes.dataset,
            "training": hashes.drafter,
            "evaluation": hashes.evaluation,
        }
        for stage, output in outputs.items():
            found = progress(self._store, hashes, stage) if stage in at_work else shown.get(stage)
            if found is not None:
                shown[stage] = found
            at = self._movement.note(stage, output, found)
            if at is not None:
                moved[stage] = at
        seen = Observed(
            name=self._drafter.metadata.name,
            spec=self._drafter.spec,
            hashes=hashes,
            committed=done,
            children=children,
            record=self._record,
            now=time.time(),
            progress=moved,
            suggested_targets=suggested_targets(shown.get("training")),
        )
        self._books.look(seen.now, at_work, self._record, moved)
        return seen, shown

    def _projection(self, seen: Observed, shown: Mapping[Stage, Progress]) -> Projection:
        stage = current_stage(seen)
        return project(
            self._books.spending,
            stage,
            shown.get(stage) if stage else None,
            now=seen.now,
            price=seen.spec.tracking.gpu_hour_price,
            warm_up=self._books.warm_up,
        )

    @property
    def _books(self) -> Accounts:
        if self._accounts is None:
            self._accounts = Accounts(self._store, self._drafter.metadata.name)
        return self._accounts

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, StopGroup):
            group = (action.role, action.hash, action.attempt)
            self._children.stop(lambda c: (c.role, c.hash, c.attempt) == group)
        elif isinstance(action, StopChild):
            self._children.stop(lambda c: c.id == action.child.id)
        elif isinstance(action, Promote):
            from dflash.evaluation.gate import promote

            report = self._store.get(layout.report(action.evaluation))
            length = orjson.loads(report)["acceptance_length"]["pooled"]
            promote(
                self._store,
                action.name,
                drafter=action.drafter,
                evaluation=action.evaluation,
                report_sha256=_sha256(report),
                acceptance_length=length,
            )
            self._wake.put(None)

    def _start(self, action: Start) -> None:
        self._worked = True
        stage = STAGE_OF[action.role]
        if stage not in self._described:
            write_inputs(self._store, self._outputs, stage)
            self._described.add(stage)
        if action.role == "drafter":
            self._port = _free_port()
        gpus = visible_gpus()
        alive = {(c.role, c.index) for c in self._children.look() if c.live and STAGE_OF[c.role] == stage}
        training = self._drafter.spec.training
        targets = training.targets if isinstance(training.targets, int) else 1
        side_by_side = {
            "generation": action.world,
            "training": targets * training.target_devices + training.drafters,
            "evaluation": 1,
        }[stage]
        first = targets * training.target_devices if action.role == "drafter" else 0
        each = training.target_devices if action.role == "target" else 1
        for index in action.indexes:
            if (action.role, index) in alive:
                continue
            group = names.group(self._drafter.metadata.name, action.role, action.hash, action.attempt)
            child = self._children.start(
                action.role,
                action.hash,
                index,
                attempt=action.attempt,
                world=action.world,
                command=self._command(
                    action, index, self._port, resource=self._home.resource, hashes=self._outputs.hashes
                ),
                environment={
                    **thread_limits(side_by_side),
                    **self._environment,
                    **gpu_share(gpus, first + index * each, side_by_side, each),
                },
                log=self._home.logs / f"{group}-{index}.log",
            )
            log.info("started %s %d (attempt %d): process %s", action.role, index, action.attempt, child.id)

    # --- the record ---

    def _load_record(self) -> None:
        key = layout.record(self._drafter.metadata.name)
        try:
            data, self._etag = self._store.read(key)
        except NotFound:
            return
        self._record = restarted(_RECORD.validate_json(data))

    def _save(self, record: Record) -> None:
        """Write the record down before anything is done that it speaks of."""
        key = layout.record(self._drafter.metadata.name)
        etag = self._store.swap(key, to_json(_plain(record)), self._etag)
        if etag is None:
            raise TakenOver(f"another run of {self._drafter.metadata.name!r} has taken over; this one ends")
        self._record, self._etag = record, etag

    # --- waiting ---

    _wake_at: float | None = None

    def _sleep(self, wake_at: float | None) -> None:
        """Until something happens, a wait ends, or the next look is due."""
        times = [t for t in (wake_at, self._children.next_kill) if t is not None]
        seconds = min([LOOK_SECONDS, *(max(0.0, t - time.time()) for t in times)])
        try:
            self._wake.get(timeout=max(seconds, 0.02))
            while True:
                self._wake.get_nowait()
        except queue.Empty:
            return

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        def hear(number: int, _: FrameType | None) -> None:
            self._signal = self._signal or number
            self._signals += 1
            self._wake.put(None)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, hear) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class TakenOver(DflashError):  # noqa: N818
    """Another executor writes this Drafter's record."""

    exit_code = ExitCode.TEMPORARY


def job_command(action: Start, index: int, port: int, *, resource: Path, hashes: StageHashes) -> list[str]:
    """The command line of one job; `port` is where this attempt's drafters meet."""
    flags: dict[str, Any] = {"resource": resource, "dataset": hashes.dataset}
    if action.role == "generate":
        flags |= {"index": index, "replicas": action.world}
    elif action.role == "target":
        flags |= {"run": action.hash, "index": index}
    elif action.role == "drafter":
        flags |= {"run": action.hash, "attempt": action.attempt, "rank": index, "world": action.world}
        flags |= {"rendezvous": f"127.0.0.1:{port}"}
    else:
        flags |= {"run": hashes.drafter, "evaluation": action.hash}
    return [sys.executable, "-m", f"jobs.{action.role}", *(f"--{k}={v}" for k, v in flags.items())]


def thread_limits(processes: int) -> dict[str, str]:
    """Variables that share this machine's cores out among processes that compute side by side."""
    threads = str(max(1, cores() // processes))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def gpu_share(gpus: Sequence[str], place: int, processes: int, places: int = 1) -> dict[str, str]:
    """The variable that gives one of `processes` side by side its GPUs: a slice, or turns where they are few.

    A target over several devices has as many `places`, and the share of each. Targets have the first ones
    and drafters those behind. Nothing where there is no choice.
    """
    if len(gpus) < 2:
        return {}
    each = max(1, len(gpus) // processes)
    mine = [gpus[(place * each + i) % len(gpus)] for i in range(each * places)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(mine))}


def cores() -> int:
    """Cores this process may use."""
    affinity: Literal["sched_getaffinity"] = "sched_getaffinity"
    return len(getattr(os, affinity)(0)) if hasattr(os, affinity) else os.cpu_count() or 1


@contextmanager
def _kept_up(embedded: EmbeddedStore | None) -> Iterator[None]:
    """Start the embedded server again when it dies, from a thread, since the loop may be waiting for it."""
    if embedded is None:
        yield
        return
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.5):
            if embedded.pid is None:
                log.warning("the embedded S3 server has died; it is started again")
                try:
                    embedded.restart()
                except DflashError as error:
                    log.warning("%s", error)

    keeper = threading.Thread(target=keep, name="embedded-store-keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _exit_code(snapshot: Snapshot) -> int:
    """0 when all is as declared; a failed gate is a result, not an error."""
    if snapshot.summary.phase != "Stalled" or snapshot.committed.evaluation:
        return int(ExitCode.DONE)
    failure = snapshot.summary.failure
    told = (ExitCode.CONFIGURATION, ExitCode.TEMPORARY)
    return next((int(code) for code in told if failure is not None and failure.exit_code == code), 1)


_RECORD = TypeAdapter(Record)


def _plain(record: Record) -> dict[str, Any]:
    """The record as JSON can hold it, the same bytes for the same record."""
    plain = asdict(record)
    for role in plain["roles"].values():
        role["counted"] = sorted(role["counted"])
    return plain


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)
