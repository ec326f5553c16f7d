"""A cluster in memory: an API server that keeps versions, a job controller, a kubelet, a store's view.

Small enough to run thousands of looks a second, so that the operator can be stopped at every request it
makes. Real API servers are in `tests/cluster`.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from dflash.planning.spending import Spending
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.resource.hashes import stage_hashes
from dflash.resource.storage import Storage
from operators.actions import Promote
from operators.cluster import Caches, Cluster, Pace
from operators.kube import DRAFTERS, JOBS, PODS, SERVICES, Conflict, NotFound, Object, Resource, timestamp
from operators.observed import ROLES, Committed, Stage
from operators.pods import is_finished
from operators.view import Look, StoreView

NAMESPACE = "ns"
TEMPLATE: Object = {
    "spec": {
        "backoffLimit": 0,
        "template": {"spec": {"containers": [{"name": "main", "command": ["python"]}]}},
    }
}


class Crash(Exception):
    """The operator's process ends here."""


class FakeApi:
    """Objects by kind and name; each write has a new version. `before` and `after` see every write."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.versions = itertools.count(1)
        self.writes: list[tuple[str, str, str]] = []
        self.before: Callable[[int], None] = lambda _: None
        self.after: Callable[[int], None] = lambda _: None
        self.events: list[str] = []
        self.clock = 1_800_000_000.0

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self.find(resource, namespace, name)
        if found is None:
            raise NotFound(404, "NotFound", name)
        return found

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        found = self.objects.get(resource.plural, {}).get(name)
        return copy.deepcopy(found)

    def list(self, resource: Resource, namespace: str, selector: str = "") -> tuple[list[Object], str]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        found = [
            copy.deepcopy(o)
            for o in self.objects.get(resource.plural, {}).values()
            if wanted.items() <= o["metadata"].get("labels", {}).items()
        ]
        return found, "0"

    def create(self, resource: Resource, namespace: str, body: Object, dry_run: bool = False) -> Object:
        name = body["metadata"]["name"]
        if name in self.objects.get(resource.plural, {}):
            raise Conflict(409, "AlreadyExists", name)
        return self._write("create", resource, body)

    def apply(self, resource: Resource, namespace: str, body: Object) -> Object:
        return self._write("apply", resource, body)

    def patch(
        self, resource: Resource, namespace: str, name: str, body: Object, subresource: str = ""
    ) -> Object:
        known = self.get(resource, namespace, name)
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != known["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", name)
        for part in [subresource] if subresource else ["spec", "metadata"]:
            known[part] = _merged(known.get(part, {}), body.get(part, {}))
        return self._write("patch", resource, known)

    def delete(self, resource: Resource, namespace: str, name: str, propagation: str = "Foreground") -> None:
        known = self.find(resource, namespace, name)
        if known is None:
            return
        if resource is JOBS:
            known["metadata"]["deletionTimestamp"] = timestamp_of(self.clock)
            self._write("delete", resource, known)
        else:
            self._number("delete", resource, name)
            self.objects[resource.plural].pop(name)
            self.after(len(self.writes))

    def event(self, about: Object, kind: str, reason: str, message: str) -> None:
        self.events.append(reason)

    def put(self, resource: Resource, body: Object) -> Object:
        """Write as somebody else than the operator."""
        body = copy.deepcopy(body)
        metadata = body["metadata"]
        metadata.setdefault("uid", f"uid-{next(self.versions)}")
        metadata.setdefault("namespace", NAMESPACE)
        metadata.setdefault("creationTimestamp", timestamp_of(self.clock))
        metadata["resourceVersion"] = str(next(self.versions))
        self.objects.setdefault(resource.plural, {})[metadata["name"]] = body
        return copy.deepcopy(body)

    def _write(self, verb: str, resource: Resource, body: Object) -> Object:
        self._number(verb, resource, body["metadata"]["name"])
        known = self.objects.get(resource.plural, {}).get(body["metadata"]["name"])
        if known is not None:
            body = {**body, "metadata": {**known["metadata"], **body["metadata"]}}
        written = self.put(resource, body)
        if "deletionTimestamp" in body["metadata"] and body["metadata"].get("finalizers") == []:
            self.objects[resource.plural].pop(body["metadata"]["name"])
        self.after(len(self.writes))
        return written

    def _number(self, verb: str, resource: Resource, name: str) -> None:
        self.before(len(self.writes) + 1)
        self.writes.append((verb, resource.plural, name))


class FakeCache:
    """The informer's reading half, always current (or as it was, when `frozen`)."""

    def __init__(self, api: FakeApi, resource: Resource) -> None:
        self._api, self._resource = api, resource

    def get(self, name: str) -> Object | None:
        return self._api.find(self._resource, NAMESPACE, name)

    def labelled(self, owner: str) -> list[Object]:
        return self._api.list(self._resource, NAMESPACE, f"dflash.dev/drafter={owner}")[0]


class FakeStore(StoreView):
    """What has been committed, by hash."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.committed: set[str] = set()
        self.promoted: tuple[str, str] | None = None
        self.spending = Spending()
        self.progress: dict[Stage, Progress] = {}

    def look(self, drafter: Drafter, uid: str, at_work: Iterable[Stage], *, take_over: bool = False) -> Look:
        hashes = stage_hashes(drafter.spec, prompts="p", target="t")
        done = Committed(
            dataset=hashes.dataset in self.committed,
            export=hashes.drafter in self.committed,
            evaluation=hashes.evaluation in self.committed,
            promoted=self.promoted == (hashes.drafter, hashes.evaluation),
        )
        return Look(hashes, done, self.progress, {})

    def describe(self, drafter: Drafter, uid: str, stage: Stage) -> None:
        return

    def account(self, drafter: Drafter, spending: Spending) -> None:
        self.spending = spending

    def promote(self, drafter: Drafter, action: Promote) -> None:
        self.promoted = (action.drafter, action.evaluation)

    def purge(self, name: str, storage: Storage) -> None:
        self.committed.clear()
        self.promoted = None


class FakeCluster:
    """All of it, and one Drafter named d."""

    def __init__(self, **spec: Any) -> None:
        self.api = FakeApi()
        self.store = FakeStore()
        self.made: list[str] = []
        """Jobs in the order in which they were created."""
        self.declare(**spec)

    def declare(self, **spec: Any) -> None:
        """`kubectl apply`."""
        known = self.api.find(DRAFTERS, NAMESPACE, "d") or {"metadata": {"name": "d", "generation": 0}}
        base = {"target": {"model": "a/b"}, "prompts": {"uri": "s3://p/q"}, "storage": {"uri": "s3://b/p"}}
        known["metadata"]["generation"] += 1
        self.api.put(
            DRAFTERS,
            {**known, "apiVersion": "dflash.dev/v1alpha1", "kind": "Drafter", "spec": {**base, **spec}},
        )

    def delete(self) -> None:
        """`kubectl delete`: at once, or, with a finalizer, once that is gone."""
        known = self.api.get(DRAFTERS, NAMESPACE, "d")
        if known["metadata"].get("finalizers"):
            known["metadata"]["deletionTimestamp"] = timestamp_of(self.api.clock)
            self.api.put(DRAFTERS, known)
        else:
            del self.api.objects["drafters"]["d"]

    def operator(self) -> Cluster:
        """A fresh operator process: it knows nothing but what the cluster has."""
        caches = Caches(*(FakeCache(self.api, r) for r in (DRAFTERS, JOBS, PODS, SERVICES)))  # type: ignore[arg-type]
        kube: Any = self.api
        return Cluster(
            kube,
            NAMESPACE,
            caches=caches,
            templates=dict.fromkeys(ROLES, TEMPLATE),
            view=self.store,
            pace=Pace(10.0, 600.0, 3600.0),
            clock=lambda: self.api.clock,
        )

    def status(self) -> Object:
        """The Drafter's."""
        return dict(self.api.get(DRAFTERS, NAMESPACE, "d").get("status", {}))

    def controllers(self) -> None:
        """One round of the job controller, the garbage collector and the kubelet."""
        api = self.api
        pods = api.objects.setdefault("pods", {})
        for name, job in list(api.objects.get("jobs", {}).items()):
            mine = {
                n: p
                for n, p in pods.items()
                if p["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
            }
            if "deletionTimestamp" in job["metadata"]:
                for pod in mine.values():
                    if pod["status"]["phase"] in ("Pending", "Running"):
                        self.end(pod, 143)
                for pod_name in mine:
                    del pods[pod_name]
                del api.objects["jobs"][name]
                continue
            if name not in self.made:
                self.made.append(name)
            if is_finished(job):
                continue
            if not mine:
                for index in range(job["spec"]["completions"]):
                    self._pod(job, index)
                continue
            phases = {p["status"]["phase"] for p in mine.values()}
            if "Failed" in phases or phases == {"Succeeded"}:
                kind = "Failed" if "Failed" in phases else "Complete"
                job["status"] = {"conditions": [{"type": kind, "status": "True"}]}
                for pod in mine.values():
                    if pod["status"]["phase"] == "Running":
                        self.end(pod, 143)
        self._check_one_attempt()

    def work(self) -> None:
        """Let what runs get done: commit its output and succeed; targets go on."""
        for pod in self.live():
            labels = pod["metadata"]["labels"]
            role = labels["dflash.dev/role"]
            if role == "target":
                continue
            self.store.committed.add(labels["dflash.dev/hash"])
            self.end(pod, 0)

    def live(self, role: str = "") -> list[Object]:
        """Pods that run."""
        found = [p for p in self.api.objects.get("pods", {}).values() if p["status"]["phase"] == "Running"]
        return [p for p in found if role in ("", p["metadata"]["labels"]["dflash.dev/role"])]

    def end(self, pod: Object, code: int) -> None:
        """A container ends."""
        at = timestamp_of(self.api.clock)
        state = {"terminated": {"exitCode": code, "finishedAt": at, "reason": "Error"}}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "main", "state": state}],
        }

    def _pod(self, job: Object, index: int) -> None:
        self.api.put(
            PODS,
            {
                "metadata": {
                    "name": f"{job['metadata']['name']}-{index}",
                    "labels": job["spec"]["template"]["metadata"]["labels"],
                    "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                    "ownerReferences": [{"uid": job["metadata"]["uid"]}],
                },
                "spec": {"containers": [{"name": "main"}], "nodeName": "n"},
                "status": {"phase": "Running"},
            },
        )

    def _check_one_attempt(self) -> None:
        attempts = {p["metadata"]["labels"]["dflash.dev/attempt"] for p in self.live("drafter")}
        assert len(attempts) <= 1, f"two live attempts: {attempts}"


def timestamp_of(when: float) -> str:
    """Unix time as Kubernetes writes it."""
    from datetime import UTC, datetime

    return timestamp(datetime.fromtimestamp(when, UTC))


def _merged(base: Object, patch: Object) -> Object:
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result
