"""Makes Drafters true on a cluster: look at pods and store, plan, write down, act, tell.

The counterpart of `operators.local`. One call of `reconcile` per change; the order within it is what
makes a crash at any point harmless: children are seen before the store, the record is in the status
before anything is created or deleted, and creating or deleting twice is the same as once.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dflash.errors import ConfigurationError, TemporaryError
from dflash.planning.spending import Spending, project
from dflash.resource import Drafter
from dflash.resource.load import Document, parse_resource
from dflash.resource.storage import Storage
from operators import manifests, names, report
from operators.accounts import catching_up
from operators.actions import Action, Promote, Start, StopChild, StopGroup, Wait
from operators.conditions import Summary, refused, summarize
from operators.informer import Informer
from operators.kube import (
    DRAFTERS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    ApiError,
    Conflict,
    Kube,
    NotFound,
    Object,
    parse_time,
    timestamp,
)
from operators.observe import suggested_targets
from operators.observed import STAGE_OF, Child, Observed, Role
from operators.plan import Plan, current_stage, plan
from operators.pods import DRAFTER, ROLE, children, gpus_of, group_of, is_finished
from operators.view import Look, StoreView

log = logging.getLogger(__name__)

_TAKE_OVER = "dflash.dev/take-over"
"""Annotation with the value "true": this Drafter goes on with what another of its name has made."""
FINALIZER = "dflash.dev/data"
"""Of a Drafter with `storage.deletionPolicy: Delete`, until its data is deleted."""
_FINISHED_KEPT = 12
"""Finished Jobs of a Drafter that are kept: four stages' worth of a few runs, or as many lost attempts."""
_LOST_RACE_SECONDS = 0.2
_PREDECESSOR_SECONDS = 0.5


@dataclass(frozen=True)
class Caches:
    """Local copies of what the reconciler looks at."""

    drafters: Informer
    jobs: Informer
    pods: Informer
    services: Informer


@dataclass(frozen=True)
class Pace:
    """How often to look, in seconds."""

    poll: float
    resync: float
    settled_resync: float


class Cluster:
    """Reconciles the Drafters of one namespace. `reconcile` may run in many threads, one a Drafter."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        *,
        caches: Caches,
        templates: Mapping[Role, Object],
        view: StoreView,
        pace: Pace,
        network_policies: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube, self._namespace = kube, namespace
        self._caches, self._templates, self._view, self._pace = caches, templates, view, pace
        self._clock, self._network_policies = clock, network_policies
        self._lock = threading.Lock()
        self._latest: dict[str, Object] = {}
        """Drafters as our own last write left them: the informer may lag behind."""
        self._look_at: dict[str, float] = {}
        """When a settled Drafter is to be looked at in full."""
        self.status_writes = 0
        self.actions: dict[str, int] = {}

    def reconcile(self, name: str) -> float | None:
        """Bring one Drafter closer to its declaration; returns seconds to the next look, None when gone."""
        item = self._current(name)
        if item is None:
            # Children have the Drafter as owner: the garbage collector ends them.
            self._forget(name)
            return None
        if "deletionTimestamp" in item["metadata"]:
            return self._leave(name, item)
        now = self._clock()
        alive = self._children(name)
        settled = self._settled_for(name, item, alive, now)
        if settled is not None:
            return settled
        try:
            drafter = parse_resource(Document(f"Drafter {name}", _plain(item)))
            item = self._keep_finalizer(item, drafter.spec.storage.deletion_policy == "Delete")
            seen, look = self._observe(drafter, item, alive, now)
        except ConfigurationError as error:
            self._write(
                item, report.refused_status(_status(item), _generation(item), refused(str(error)), now)
            )
            return self._pace.resync
        except TemporaryError as error:
            self._tell_waiting(item, "StoreUnreachable", str(error), now)
            raise
        decided = plan(seen)
        for action in decided.actions:
            if isinstance(action, Start) and action.role == "drafter":
                self._require_alone(name, action)
        item = self._write_down(item, drafter, seen, decided, look)
        owner = manifests.Owner(name, self._namespace, item["metadata"]["uid"])
        work = manifests.Work(drafter, seen.hashes.dataset, seen.hashes.drafter, seen.hashes.evaluation)
        waiting: _StillThereError | None = None
        for action in decided.actions:
            if isinstance(action, Start):
                self._view.describe(drafter, item["metadata"]["uid"], STAGE_OF[action.role])
            try:
                self._act(action, owner, work)
            except _StillThereError as error:
                # The others go on: an attempt that is written down and not started would count as lost.
                waiting = error
        if waiting is not None:
            raise waiting
        self._keep_services(name, owner)
        self._tidy(name)
        return self._next_look(name, decided, seen, now)

    # -- leaving -----------------------------------------------------------------------------

    def _leave(self, name: str, item: Object) -> float | None:
        """A Drafter that is being deleted: end its pods, delete its data, and let it go."""
        if FINALIZER not in item["metadata"].get("finalizers", []):
            self._forget(name)
            return None
        try:
            storage = Storage.model_validate(item["spec"]["storage"], by_alias=True, by_name=False)
            if storage.deletion_policy == "Delete":
                for job in self._caches.jobs.labelled(name):
                    if "deletionTimestamp" not in job["metadata"]:
                        self._kube.delete(JOBS, self._namespace, job["metadata"]["name"])
                if any(child.live for child in self._children(name)):
                    return self._pace.poll
                self._view.purge(name, storage)
        except (ConfigurationError, TemporaryError) as error:
            told = f"its data cannot be deleted: {error}; or set spec.storage.deletionPolicy to Retain"
            self._tell_waiting(item, "DataNotDeleted", told, self._clock())
            raise
        self._keep_finalizer(item, False)
        log.info("deleted", extra={"drafter": name})
        return None

    def _keep_finalizer(self, item: Object, wanted: bool) -> Object:
        """Have Kubernetes wait for us before a Drafter goes, or not: the one thing of it that we write."""
        known = item["metadata"].get("finalizers", [])
        if wanted == (FINALIZER in known):
            return item
        finalizers = [*known, FINALIZER] if wanted else [f for f in known if f != FINALIZER]
        name, version = item["metadata"]["name"], item["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version, "finalizers": finalizers}}
        written = self._kube.patch(DRAFTERS, self._namespace, name, body)
        written["metadata"].pop("managedFields", None)
        with self._lock:
            self._latest[name] = written
        return written

    # -- looking -----------------------------------------------------------------------------

    def _current(self, name: str) -> Object | None:
        """The Drafter, by the informer or by our own last write, whichever is newer."""
        cached = self._caches.drafters.get(name)
        with self._lock:
            ours = self._latest.get(name)
            if cached is None or ours is None or ours["metadata"]["uid"] != cached["metadata"]["uid"]:
                return cached
            return ours if _version(ours) > _version(cached) else cached

    def _children(self, name: str) -> tuple[Child, ...]:
        # Pods first: a Job that is newer than its pods shows them as pending, never as missing.
        pods = self._caches.pods.labelled(name)
        return children(self._caches.jobs.labelled(name), pods)

    def _observe(
        self, drafter: Drafter, item: Object, alive: tuple[Child, ...], now: float
    ) -> tuple[Observed, Look]:
        at_work = sorted({STAGE_OF[c.role] for c in alive if c.live})
        take_over = (item["metadata"].get("annotations") or {}).get(_TAKE_OVER) == "true"
        look = self._view.look(drafter, item["metadata"]["uid"], at_work, take_over=take_over)
        seen = Observed(
            name=drafter.metadata.name,
            spec=drafter.spec,
            hashes=look.hashes,
            committed=look.committed,
            children=alive,
            record=report.record_of(_status(item)),
            now=now,
            progress=look.moved,
            suggested_targets=suggested_targets(look.progress.get("training")),
        )
        return seen, look

    def _settled_for(self, name: str, item: Object, alive: tuple[Child, ...], now: float) -> float | None:
        """Seconds for which a Drafter that is ready and unchanged needs no look; None when it needs one.

        After a start, looks at ready Drafters are spread over the whole period.
        """
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in _status(item).get("conditions", [])
        )
        current = _status(item).get("observedGeneration") == _generation(item)
        if not ready or not current or any(c.live for c in alive):
            with self._lock:
                self._look_at.pop(name, None)
            return None
        with self._lock:
            first = now + random.uniform(0.0, self._pace.settled_resync)
            due = self._look_at.setdefault(name, first)
            if due > now:
                return due - now
            self._look_at[name] = now + self._pace.settled_resync
        return None

    def _next_look(self, name: str, decided: Plan, seen: Observed, now: float) -> float:
        if decided.idle:
            with self._lock:
                self._look_at[name] = now + self._pace.settled_resync
            return self._pace.resync
        acted = any(not isinstance(a, Wait) for a in decided.actions)
        busy = acted or any(c.live for c in seen.children)
        wait = self._pace.poll if busy else self._pace.resync
        if any(isinstance(a, Promote) for a in decided.actions):
            wait = 0.0  # nothing on the cluster changes by it that would bring us back
        if decided.wake_at is not None:
            # A little later than the moment itself, so that it has passed by then on any clock.
            wait = min(wait, max(decided.wake_at - self._clock(), 0.0) + 0.05)
        return wait

    def _forget(self, name: str) -> None:
        with self._lock:
            self._latest.pop(name, None)
            self._look_at.pop(name, None)
        self._view.forget(name)

    # -- telling -----------------------------------------------------------------------------

    def _write_down(
        self, item: Object, drafter: Drafter, seen: Observed, decided: Plan, look: Look
    ) -> Object:
        """Store record and status, before anything is done; raises Conflict when the spec has moved."""
        told = replace(seen, record=decided.record)
        summary: Summary = summarize(seen, decided)
        spending, accounted_at = self._spending(item, seen)
        if accounted_at != _status(item).get("gpuAccountedAt", ""):
            self._view.account(drafter, spending)
        stage = current_stage(seen)
        projection = project(
            spending,
            stage,
            look.progress.get(stage) if stage else None,
            now=seen.now,
            price=seen.spec.tracking.gpu_hour_price,
            warm_up=look.warm_up,
        )
        status = report.status_of(
            _status(item),
            _generation(item),
            seen=told,
            summary=summary,
            progress=look.progress,
            spending=spending,
            projection=projection,
        )
        if accounted_at:
            status["gpuAccountedAt"] = accounted_at
        return self._write(item, report.with_record(status, decided.record))

    def _write(self, item: Object, status: Object) -> Object:
        old = _status(item)
        patch = report.merge_patch(old, status)
        if not patch:
            return item
        name = item["metadata"]["name"]
        body = {"metadata": {"resourceVersion": item["metadata"]["resourceVersion"]}, "status": patch}
        written = self._kube.patch(DRAFTERS, self._namespace, name, body, "status")
        written["metadata"].pop("managedFields", None)
        self.status_writes += 1
        with self._lock:
            self._latest[name] = written
        for event in report.events(old, status):
            log.info("%s: %s", event.reason, event.message, extra={"drafter": name})
            try:
                self._kube.event(written, event.kind, event.reason, event.message)
            except ApiError as error:  # an event lost is a nuisance, not a failure of the work
                log.warning("event %s: %s", event.reason, error, extra={"drafter": name})
        return written

    def _tell_waiting(self, item: Object, reason: str, message: str, now: float) -> None:
        """The store cannot be looked at, or written: say so, and change nothing else."""
        old = _status(item)
        told = [dict(c) for c in old.get("conditions", [])]
        for condition in told:
            if condition["type"] == "Reconciling":
                condition |= {"reason": reason, "message": message[:4096]}
                if condition["status"] != "True":
                    condition |= {"status": "True", "lastTransitionTime": _stamp(now)}
        if not told:
            told = [
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": message[:4096],
                    "lastTransitionTime": _stamp(now),
                    "observedGeneration": _generation(item),
                }
                for kind, status in (("Reconciling", "True"), ("Ready", "False"))
            ]
        new = {**old, "conditions": told, "observedGeneration": _generation(item), "message": message[:2048]}
        self._write(item, new)

    def _spending(self, item: Object, seen: Observed) -> tuple[Spending, str]:
        """GPU time up to now, and until when it is counted ('' while no GPU was ever held).

        Each look adds what the pods held since the last one, so a pod that is gone stays counted.
        """
        old = _status(item)
        spending = report.spending_of(old)
        since = old.get("gpuAccountedAt", "")
        begin = parse_time(since) if since else 0.0
        now = float(int(seen.now))  # as it is written down, so that no part of a second counts twice
        done = float(old.get("progress", {}).get("done", 0))
        held, any_held = 0.0, False
        for pod in self._caches.pods.labelled(seen.name):
            gpus = gpus_of(pod)
            started, ended = _ran(pod, now)
            if gpus and started is not None and ended > begin:
                stage = STAGE_OF[group_of(pod)[0]]
                seconds = gpus * (ended - max(started, begin))
                wasted = catching_up(seen.record, stage, done if stage == old.get("stage") else 0.0)
                spending = spending.adding(stage, max(0.0, seconds), wasted=wasted)
                any_held = True
                held += gpus if ended == now else 0
        spending = spending.model_copy(update={"gpus": held, "updated_at": now})
        return spending, _stamp(now) if any_held else since

    # -- acting ------------------------------------------------------------------------------

    def _act(self, action: Action, owner: manifests.Owner, work: manifests.Work) -> None:
        self.actions[type(action).__name__] = self.actions.get(type(action).__name__, 0) + 1
        if isinstance(action, Start):
            self._start(action, owner, work)
        elif isinstance(action, StopGroup):
            self._stop(names.group(owner.name, action.role, action.hash, action.attempt), action, owner)
        elif isinstance(action, StopChild):
            self._shrink(action.child, owner)
        elif isinstance(action, Promote):
            self._view.promote(work.drafter, action)

    def _stop(self, name: str, action: StopGroup, owner: manifests.Owner) -> None:
        known = self._caches.jobs.get(name)
        if known and "deletionTimestamp" in known["metadata"]:
            # Asked for already. Its pods go when garbage collector and kubelet come to it, which takes
            # up to a minute after the API server was away: nothing to say, or to ask, at each look.
            return
        log.info("stopping %s: %s", name, action.reason, extra={"drafter": owner.name})
        # The Job last: while it is there undeleted, the whole is done again.
        self._kube.delete(SERVICES, self._namespace, name, "Background")
        self._kube.delete(JOBS, self._namespace, name)

    def _start(self, action: Start, owner: manifests.Owner, work: manifests.Work) -> None:
        name = names.group(owner.name, action.role, action.hash, action.attempt)
        log.info("starting %s", name, extra={"drafter": owner.name})
        self._kube.apply(SERVICES, self._namespace, manifests.service(action, owner))
        if self._network_policies and STAGE_OF[action.role] == "training":
            self._kube.apply(NETWORK_POLICIES, self._namespace, manifests.network_policy(owner))
        wanted = action.world if action.role in ("generate", "drafter") else max(action.indexes) + 1
        job = manifests.job(self._templates[action.role], action, owner, work, wanted)
        try:
            self._kube.create(JOBS, self._namespace, job)
        except Conflict:
            self._adopt(name, action, wanted)

    def _adopt(self, name: str, action: Start, wanted: int) -> None:
        """There is a Job of that name: let it be, let it grow, or remove it when it has ended."""
        known = self._kube.find(JOBS, self._namespace, name)
        if known is None or "deletionTimestamp" in known["metadata"]:
            raise _StillThereError(f"{name} waits for its predecessor to be gone")
        if group_of(known) != (action.role, action.hash, action.attempt):
            # 8 of 16 digits are in the name: another output with the same 8 needs the old one gone.
            self._kube.delete(JOBS, self._namespace, name)
            raise _StillThereError(f"{name} waits for another output's Job of that name to be gone")
        if is_finished(known):
            if action.role != "drafter":
                self._kube.delete(JOBS, self._namespace, name)
                raise _StillThereError(f"{name} waits for its finished predecessor to be gone")
        elif int(known["spec"]["completions"]) < wanted and action.role == "target":
            self._resize(name, wanted)

    def _require_alone(self, name: str, action: Start) -> None:
        """No drafter of another attempt can be running: asked of the API server, not of our copies.

        Before the attempt is written down, so that it is not spent on waiting.
        """
        selector = f"{DRAFTER}={name},{ROLE}=drafter"
        pods = self._kube.list(PODS, self._namespace, selector)[0]
        jobs = self._kube.list(JOBS, self._namespace, selector)[0]
        mine = (action.hash, action.attempt)
        for job in jobs:
            if group_of(job)[1:] != mine and not is_finished(job):
                self._kube.delete(JOBS, self._namespace, job["metadata"]["name"])
        alive = [c for c in children(jobs, pods) if c.live and (c.hash, c.attempt) != mine]
        if alive:
            raise _StillThereError(f"attempt {action.attempt} waits for attempt {alive[0].attempt} to end")

    def _shrink(self, child: Child, owner: manifests.Owner) -> None:
        name = names.group(owner.name, child.role, child.hash, child.attempt)
        known = self._kube.find(JOBS, self._namespace, name)
        if known is not None and int(known["spec"]["completions"]) > child.index:
            self._resize(name, child.index)

    def _resize(self, name: str, completions: int) -> None:
        log.info("resizing %s to %d", name, completions)
        body = {"spec": {"completions": completions, "parallelism": completions}}
        self._kube.patch(JOBS, self._namespace, name, body)

    def _keep_services(self, name: str, owner: manifests.Owner) -> None:
        """Put back the Service of a living group that somebody has deleted."""
        for job in self._caches.jobs.labelled(name):
            metadata = job["metadata"]
            if (
                is_finished(job)
                or "deletionTimestamp" in metadata
                or self._caches.services.get(metadata["name"])
            ):
                continue
            role, output, attempt = group_of(job)
            self._kube.apply(
                SERVICES, self._namespace, manifests.service(Start(role, output, attempt, (), 1), owner)
            )

    def _tidy(self, name: str) -> None:
        """Keep the newest finished Jobs, to be read by a person, and remove older ones and idle Services."""
        jobs = self._caches.jobs.labelled(name)
        finished = [j for j in jobs if is_finished(j) and "deletionTimestamp" not in j["metadata"]]
        finished.sort(key=lambda j: j["metadata"]["creationTimestamp"])
        for job in finished[: max(0, len(finished) - _FINISHED_KEPT)]:
            self._kube.delete(JOBS, self._namespace, job["metadata"]["name"], "Background")
        for job in finished:
            if self._caches.services.get(job["metadata"]["name"]):
                self._kube.delete(SERVICES, self._namespace, job["metadata"]["name"], "Background")


class _StillThereError(Exception):
    """Something has to go first; try again shortly."""

    retry_seconds = _PREDECESSOR_SECONDS


def retry_of(error: Exception) -> float | None:
    """Seconds after which to try again without backoff; None for a failure that backs off."""
    if isinstance(error, Conflict):
        return _LOST_RACE_SECONDS  # somebody changed the object: look again
    if isinstance(error, NotFound):
        return _PREDECESSOR_SECONDS
    return error.retry_seconds if isinstance(error, _StillThereError) else None


def _ran(pod: Object, now: float) -> tuple[float | None, float]:
    """When a pod's containers began and ended (now while they run), as Unix times."""
    begun: float | None = None
    ended = 0.0
    for container in pod.get("status", {}).get("containerStatuses", []):
        state = container.get("state", {})
        for kind in ("running", "terminated"):
            started = state.get(kind, {}).get("startedAt")
            if started:
                begun = min(begun or parse_time(started), parse_time(started))
                finished = state[kind].get("finishedAt")
                ended = max(ended, parse_time(finished) if finished else now)
    return begun, ended


def _plain(item: Object) -> Object:
    return {key: item[key] for key in ("apiVersion", "kind", "metadata", "spec")}


def _status(item: Object) -> Object:
    return dict(item.get("status") or {})


def _generation(item: Object) -> int:
    return int(item["metadata"]["generation"])


def _version(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


def _stamp(when: float) -> str:
    return timestamp(datetime.fromtimestamp(when, UTC))
