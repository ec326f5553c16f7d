"""The operator's process: threads that watch, a queue of Drafters, workers that reconcile.

Whatever changes (a Drafter, a Job, a pod, a Service) puts the name of its Drafter into the queue; a
worker then looks at everything afresh. Not for what is decided (`operators.plan`) or done
(`operators.cluster`).
"""

import logging
import random
import threading
import time
from collections.abc import Callable

from dflash.errors import ConfigurationError, TemporaryError
from operators import manifests, metrics
from operators.cluster import Caches, Cluster, Pace, retry_of
from operators.informer import Informer
from operators.kube import DRAFTERS, JOBS, PODS, SERVICES, ApiError, Kube, Object, Resource, Unreachable
from operators.lease import LeaderLease
from operators.pods import DRAFTER, PREFIX
from operators.queue import WorkQueue
from operators.settings import OperatorSettings
from operators.view import StoreView

log = logging.getLogger(__name__)

_SYNC_SECONDS = 120.0
_DEAF_SECONDS = 180.0
"""A watch that has been silent for this long, restarts included, is an unhealthy operator."""
_MANAGED = DRAFTER  # our children carry this label


class Manager:
    """One operator process."""

    def __init__(self, kube: Kube, settings: OperatorSettings, view: StoreView) -> None:
        self._settings = settings
        self._kube = kube
        self._stop = threading.Event()
        self._queue = WorkQueue()
        self._leading = False
        self.metrics = metrics.Metrics()
        self.caches = Caches(
            self._informer(DRAFTERS, "", lambda item: str(item["metadata"]["name"])),
            self._informer(JOBS, _MANAGED, _owner),
            self._informer(PODS, _MANAGED, _owner),
            self._informer(SERVICES, _MANAGED, _owner),
        )
        self.cluster = Cluster(
            kube,
            settings.namespace,
            caches=self.caches,
            templates=manifests.load_templates(settings.templates),
            view=view,
            network_policies=settings.network_policies,
            pace=Pace(settings.poll_seconds, settings.resync_seconds, settings.settled_resync_seconds),
        )

    def run(self) -> bool:
        """Work until `stop`; False when the Lease was lost, and the process must end."""
        self._serve()
        lease = LeaderLease(
            self._kube, self._settings.namespace, self._settings.lease, self._settings.identity
        )
        if not lease.acquire(self._stop):
            return True
        log.info("leading in namespace %s", self._settings.namespace)
        threads = [threading.Thread(target=self._start, name="start", daemon=True)]
        threads[0].start()
        kept = lease.hold(self._stop)
        self._leading = False
        self._queue.close()
        self._stop.set()
        return kept

    def stop(self) -> None:
        """End after the Drafters that are being worked on."""
        self._stop.set()
        self._queue.close()

    def _start(self) -> None:
        for cache in self._all():
            threading.Thread(
                target=cache.run, args=(self._stop,), name=cache.resource.plural, daemon=True
            ).start()
        deadline = time.monotonic() + _SYNC_SECONDS
        for cache in self._all():
            if not cache.synced.wait(max(0.0, deadline - time.monotonic())):
                log.error(
                    "%s are not listed after %.0f s; still trying", cache.resource.plural, _SYNC_SECONDS
                )
                cache.synced.wait()
        self._leading = True
        for number in range(self._settings.workers):
            threading.Thread(target=self._work, name=f"worker-{number}", daemon=True).start()

    def _work(self) -> None:
        while (name := self._queue.take()) is not None:
            failed = False
            started = time.monotonic()
            try:
                wait = self.cluster.reconcile(name)
                outcome = "done"
            except Exception as error:  # noqa: BLE001 - one Drafter's failure must not end the worker
                wait, outcome, failed = self._failure(name, error)
            self.metrics.reconciles.labels(outcome).inc()
            self.metrics.seconds.observe(time.monotonic() - started)
            self._queue.done(name, failed)
            if wait is not None and not failed:
                self._queue.add(name, wait * random.uniform(0.9, 1.0) if wait > 60 else wait)

    def _failure(self, name: str, error: Exception) -> tuple[float | None, str, bool]:
        soon = retry_of(error)
        if soon is not None:
            log.info("again in %.1f s: %s", soon, error, extra={"drafter": name})
            return soon, "retry", False
        if isinstance(error, Unreachable | ApiError | TemporaryError | ConfigurationError):
            log.warning("%s", error, extra={"drafter": name})
        else:
            log.exception("reconciling failed", extra={"drafter": name})
        return None, "error", True

    def _informer(self, resource: Resource, selector: str, key: Callable[[Object], str | None]) -> Informer:
        def changed(old: Object | None, new: Object | None) -> None:
            item = new or old
            name = key(item) if item is not None else None
            if name is not None and _matters(old, new):
                self._queue.add(name)

        return Informer(self._kube, resource, self._settings.namespace, changed, selector)

    def _all(self) -> tuple[Informer, ...]:
        return self.caches.drafters, self.caches.jobs, self.caches.pods, self.caches.services

    def _serve(self) -> None:
        figures = metrics.Figures(
            drafters=lambda: filter(None, map(self.caches.drafters.get, self.caches.drafters.names())),
            queue_length=lambda: len(self._queue),
            requests=lambda: self._kube.requests,
            actions=lambda: self.cluster.actions,
            status_writes=lambda: self.cluster.status_writes,
            watch_silence=lambda: {c.resource.plural: time.monotonic() - c.heard_at for c in self._all()},
            relists=lambda: {c.resource.plural: c.relists for c in self._all()},
        )
        self.metrics.registry.register(figures)
        self.endpoints = metrics.serve(
            self._settings.address,
            self._settings.port,
            metrics=self.metrics,
            healthy=self._unhealthy,
            ready=lambda: "" if self._leading else "waiting for the lease, or for the first lists",
        )

    def _unhealthy(self) -> str:
        if not self._leading:
            return ""
        silent = [c.resource.plural for c in self._all() if time.monotonic() - c.heard_at > _DEAF_SECONDS]
        return f"nothing heard about {', '.join(silent)} for {_DEAF_SECONDS:.0f} s" if silent else ""


def _owner(item: Object) -> str | None:
    labels = item["metadata"].get("labels") or {}
    return labels.get(f"{PREFIX}/drafter")


def _matters(old: Object | None, new: Object | None) -> bool:
    """Our own writes of a status need no look; everything else does."""
    if old is None or new is None or new["kind"] != "Drafter":
        return True
    before, after = old["metadata"], new["metadata"]
    return bool(
        before.get("generation") != after.get("generation")
        or before.get("deletionTimestamp") != after.get("deletionTimestamp")
        or before.get("uid") != after.get("uid")
    )
