"""From Jobs and Pods to the planner's `Child`: what each process of a Drafter is doing, and why.

Pure. A Job whose pods are not there yet (or not any more, while it will make new ones) shows as
pending children, so that what has been asked for is always seen. Not for judging failures: that is
`operators.failures`.
"""

from collections.abc import Iterable
from typing import Any, cast

from operators.kube import Object, parse_time
from operators.observed import Child, Role, State

PREFIX = "dflash.dev"
DRAFTER, ROLE, HASH, ATTEMPT, WORLD = (
    f"{PREFIX}/{part}" for part in ("drafter", "role", "hash", "attempt", "world")
)
MAIN = "main"
"""Name of the container whose end is the child's end."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_SUSPENDED = "its Job is suspended: a queue has not let it start yet, or has taken its place back"
_NO_POD = "its Job has made no pod yet; if this lasts, see what forbids it: kubectl describe job {}"
_MESSAGE = 1000
# Waiting for one of these is not starting up: it ends only when somebody does something.
_STUCK = {
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
}


def children(jobs: Iterable[Object], pods: Iterable[Object]) -> tuple[Child, ...]:
    """All children of one Drafter, in no particular order."""
    pods_of: dict[str, list[Object]] = {}
    for pod in pods:
        owner = next((o["uid"] for o in pod["metadata"].get("ownerReferences", [])), "")
        pods_of.setdefault(owner, []).append(pod)
    found: list[Child] = []
    for job in jobs:
        mine = pods_of.pop(job["metadata"]["uid"], [])
        seen = [_from_pod(pod) for pod in mine]
        found += seen
        found += _awaited(job, seen)
    # A Job that is gone leaves pods for a moment, until the garbage collector comes.
    found += [_from_pod(pod) for rest in pods_of.values() for pod in rest]
    return tuple(found)


def is_finished(job: Object) -> bool:
    """The Job makes no pods any more: it is Complete, or has Failed."""
    return any(
        c["type"] in ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet") and c["status"] == "True"
        for c in job.get("status", {}).get("conditions", [])
    )


def group_of(item: Object) -> tuple[Role, str, int]:
    """Role, hash and attempt that a Job or Pod is labelled with."""
    labels = item["metadata"]["labels"]
    return cast(Role, labels[ROLE]), labels[HASH], int(labels[ATTEMPT])


def gpus_of(pod: Object) -> int:
    """GPUs that a pod holds, of any vendor's resource name."""
    total = 0
    for container in pod["spec"]["containers"]:
        limits = (container.get("resources") or {}).get("limits") or {}
        total += sum(int(count) for name, count in limits.items() if is_gpu(name))
    return total


def is_gpu(resource: str) -> bool:
    """Whether a resource's name is of GPUs, of any vendor."""
    return resource.partition("/")[2] == "gpu"


def _awaited(job: Object, seen: list[Child]) -> list[Child]:
    """Pods that the Job is yet to make, as pending (or, when it is being deleted, stopping) children."""
    metadata = job["metadata"]
    role, output, attempt = group_of(job)
    stopping = "deletionTimestamp" in metadata
    if is_finished(job) and not stopping:
        return []
    # A member of a group is never replaced; an elastic one is there while it lives or has succeeded.
    there = {c.index for c in seen if role == "drafter" or c.live or c.state == "succeeded"}
    if stopping and seen:
        return []
    suspended = bool(job["spec"].get("suspend"))
    return [
        Child(
            id=f"{metadata['uid']}/{index}",
            role=role,
            hash=output,
            index=index,
            state="stopping" if stopping else "pending",
            attempt=attempt,
            world=int(metadata["labels"][WORLD]),
            created_at=parse_time(metadata["creationTimestamp"]),
            reason="Suspended" if suspended else "",
            message=_SUSPENDED if suspended else _NO_POD.format(metadata["name"]),
        )
        for index in range(int(job["spec"]["completions"]))
        if index not in there
    ]


def _from_pod(pod: Object) -> Child:
    metadata, status = pod["metadata"], pod.get("status", {})
    role, output, attempt = group_of(pod)
    state = _state(pod)
    terminated = _terminated(status)
    reason, message = _why(pod, state, terminated)
    ended = terminated.get("finishedAt") if terminated else None
    return Child(
        id=metadata["uid"],
        role=role,
        hash=output,
        index=int(metadata.get("annotations", {}).get(_INDEX, 0)),
        state=state,
        attempt=attempt,
        world=int(metadata["labels"][WORLD]),
        created_at=parse_time(metadata["creationTimestamp"]),
        ended_at=parse_time(ended) if ended else None,
        exit_code=int(terminated["exitCode"]) if terminated else None,
        reason=reason,
        message=message,
        disrupted=state in ("failed", "stopping") and _disrupted(pod),
        node=pod["spec"].get("nodeName", ""),
    )


def _state(pod: Object) -> State:
    phase = pod.get("status", {}).get("phase", "Pending")
    if phase == "Succeeded":
        return "succeeded"
    if phase == "Failed":
        return "failed"
    if "deletionTimestamp" in pod["metadata"]:
        return "stopping"
    # A container that has failed is a dead child, whatever its pod still tidies up.
    terminated = _terminated(pod.get("status", {}))
    if terminated and terminated["exitCode"] != 0:
        return "failed"
    return "running" if phase == "Running" else "pending"


def _terminated(status: Object) -> dict[str, Any] | None:
    """How the main container ended, if it has."""
    for container in status.get("containerStatuses", []):
        if container["name"] == MAIN:
            ended = container.get("state", {}).get("terminated")
            return dict(ended) if ended else None
    return None


def _condition(pod: Object, kind: str) -> dict[str, Any] | None:
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == kind:
            return dict(condition)
    return None


def _disrupted(pod: Object) -> bool:
    """Taken away by the platform: scheduler, eviction, taint, garbage collection, kubelet, or a person."""
    target = _condition(pod, "DisruptionTarget")
    if target is not None and target["status"] == "True":
        return True
    if pod.get("status", {}).get("reason") in ("Evicted", "NodeLost", "Shutdown", "Preempting"):
        return True
    # Deleted by hand. A child of ours that we delete is counted before, and not looked at again.
    return "deletionTimestamp" in pod["metadata"] and not _died_first(pod)


def _died_first(pod: Object) -> bool:
    """The container had failed by itself before the pod was deleted (such as with its whole group)."""
    terminated = _terminated(pod.get("status", {}))
    if not terminated or not terminated.get("finishedAt"):
        return False
    grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    asked = parse_time(pod["metadata"]["deletionTimestamp"]) - grace
    return parse_time(terminated["finishedAt"]) < asked


def _why(pod: Object, state: State, terminated: dict[str, Any] | None) -> tuple[str, str]:
    """CamelCase reason and sentence of a pod that waits or has failed; both empty when all is well."""
    status = pod.get("status", {})
    if state == "failed":
        target = _condition(pod, "DisruptionTarget")
        if terminated and terminated.get("reason") == "OOMKilled":
            return "OOMKilled", _out_of_memory(pod)
        if target is not None and target["status"] == "True":
            return _reason_of_disruption(target, status), str(target.get("message", ""))[:_MESSAGE]
        if status.get("reason"):
            return str(status["reason"]), str(status.get("message", ""))[:_MESSAGE]
        if terminated:
            return "", str(terminated.get("message") or "").strip()[-_MESSAGE:]
        return "", ""
    if state == "pending":
        scheduled = _condition(pod, "PodScheduled")
        if scheduled is not None and scheduled["status"] == "False":
            return str(scheduled.get("reason", "Unschedulable")), str(scheduled.get("message", ""))[:_MESSAGE]
        for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                return str(waiting["reason"]), str(waiting.get("message", ""))[:_MESSAGE]
    return "", ""


def _reason_of_disruption(target: dict[str, Any], status: Object) -> str:
    return str(status.get("reason") or target.get("reason") or "Disrupted")


def _out_of_memory(pod: Object) -> str:
    main = next(c for c in pod["spec"]["containers"] if c["name"] == MAIN)
    limit = (main.get("resources") or {}).get("limits", {}).get("memory")
    stated = f"its memory limit of {limit}" if limit else "the node's memory"
    return f"used more than {stated}; raise the role's memory in the chart's values or shrink its batch"
