"""What Jobs and pods mean to the planner."""

from typing import Any

import pytest

from operators.pods import children, gpus_of

Object = dict[str, Any]
LABELS = {
    "dflash.dev/drafter": "d",
    "dflash.dev/role": "drafter",
    "dflash.dev/hash": "0123456789abcdef",
    "dflash.dev/attempt": "3",
    "dflash.dev/world": "2",
}
CREATED = "2026-01-01T00:00:00Z"


def job(
    completions: int = 2, role: str = "drafter", conditions: list[Object] | None = None, **metadata: Any
) -> Object:
    return {
        "metadata": {
            "uid": "job-1",
            "name": "d-dft",
            "labels": {**LABELS, "dflash.dev/role": role},
            "creationTimestamp": CREATED,
            **metadata,
        },
        "spec": {"completions": completions},
        "status": {"conditions": conditions or []},
    }


def pod(index: int = 0, phase: str = "Running", role: str = "drafter", **parts: Any) -> Object:
    return {
        "metadata": {
            "uid": f"pod-{index}",
            "name": f"d-dft-{index}",
            "labels": {**LABELS, "dflash.dev/role": role},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "creationTimestamp": CREATED,
            "ownerReferences": [{"uid": "job-1"}],
            **parts.pop("metadata", {}),
        },
        "spec": {"containers": [{"name": "main", "resources": parts.pop("resources", {})}], "nodeName": "n1"},
        "status": {"phase": phase, **parts.pop("status", {})},
    }


def ended(code: int, reason: str = "Error", message: str = "", at: str = "2026-01-01T00:01:00Z") -> Object:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}}
    return {"containerStatuses": [{"name": "main", "state": state}]}


def test_pods_that_a_job_has_not_made_yet_are_pending() -> None:
    found = children([job()], [pod(0)])
    assert {(c.index, c.state) for c in found} == {(0, "running"), (1, "pending")}
    assert {(c.role, c.attempt, c.world, c.hash) for c in found} == {("drafter", 3, 2, "0123456789abcdef")}


def test_a_member_of_a_group_is_never_expected_again_but_an_elastic_one_is() -> None:
    failed = {"status": ended(1)}
    assert [c.state for c in children([job(1)], [pod(0, "Failed", **failed)])] == ["failed"]
    elastic = children([job(1, "target")], [pod(0, "Failed", "target", status=ended(1))])
    assert sorted(c.state for c in elastic) == ["failed", "pending"]


def test_a_job_that_a_queue_holds_is_told_from_one_that_may_not_make_pods() -> None:
    held = job(1)
    held["spec"]["suspend"] = True
    (waiting,) = children([held], [])
    assert (waiting.state, waiting.reason) == ("pending", "Suspended")
    (refused,) = children([job(1)], [])
    assert (refused.state, refused.reason) == ("pending", "")
    assert "kubectl describe job d-dft" in refused.message


def test_a_finished_job_makes_no_more_pods() -> None:
    for kind in ("Complete", "Failed", "FailureTarget"):
        assert children([job(conditions=[{"type": kind, "status": "True"}])], []) == ()


def test_a_job_that_is_being_deleted_lives_until_it_is_gone() -> None:
    (a, b) = children([job(deletionTimestamp=CREATED)], [])
    assert a.state == b.state == "stopping"
    assert [
        c.state for c in children([job(deletionTimestamp=CREATED)], [pod(0, "Failed", status=ended(143))])
    ] == ["failed"]


def test_pods_whose_job_is_gone_still_count() -> None:
    assert [c.state for c in children([], [pod(0)])] == ["running"]


@pytest.mark.parametrize(
    ("status", "phase", "expected"),
    [
        (ended(78, message="the prompts are missing"), "Failed", (78, "", "the prompts are missing", False)),
        (ended(1, message="ValueError: x"), "Failed", (1, "", "ValueError: x", False)),
        (ended(75), "Failed", (75, "", "", False)),
        ({"reason": "Evicted", "message": "low on disk"}, "Failed", (None, "Evicted", "low on disk", True)),
    ],
)
def test_why_a_pod_has_failed(status: Object, phase: str, expected: tuple[Any, ...]) -> None:
    (child,) = children([], [pod(0, phase, status=status)])
    assert (child.exit_code, child.reason, child.message, child.disrupted) == expected
    assert child.state == "failed"


def test_out_of_memory_is_told_with_its_limit() -> None:
    limits = {"limits": {"memory": "64Mi"}}
    (child,) = children([], [pod(0, "Failed", status=ended(137, "OOMKilled"), resources=limits)])
    assert child.reason == "OOMKilled"
    assert "64Mi" in child.message
    assert not child.disrupted


def test_eviction_and_preemption_are_disruptions() -> None:
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "evicted",
    }
    (child,) = children([], [pod(0, "Failed", status=ended(143) | {"conditions": [target]})])
    assert child.disrupted
    assert (child.reason, child.exit_code) == ("EvictionByEvictionAPI", 143)


def test_a_pod_deleted_by_hand_is_a_disruption_but_one_that_failed_first_is_not() -> None:
    gone = {"deletionTimestamp": "2026-01-01T00:02:00Z", "deletionGracePeriodSeconds": 30}
    (stopping,) = children([], [pod(0, metadata=gone)])
    assert (stopping.state, stopping.disrupted) == ("stopping", True)
    (failed,) = children([], [pod(0, "Failed", metadata=gone, status=ended(1, at="2026-01-01T00:00:30Z"))])
    assert (failed.state, failed.disrupted) == ("failed", False)
    (killed,) = children([], [pod(0, "Failed", metadata=gone, status=ended(143, at="2026-01-01T00:01:45Z"))])
    assert (killed.state, killed.disrupted) == ("failed", True)


def test_a_failed_container_is_a_failed_child_before_its_pod_says_so() -> None:
    (child,) = children([], [pod(0, "Running", status=ended(1))])
    assert child.state == "failed"


def test_why_a_pod_waits() -> None:
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes: no GPU",
    }
    (queued,) = children([], [pod(0, "Pending", status={"conditions": [scheduled]})])
    assert (queued.state, queued.reason, queued.message) == ("pending", "Unschedulable", "0/1 nodes: no GPU")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    stuck = {"containerStatuses": [{"name": "main", "state": waiting}]}
    (pulling,) = children([], [pod(0, "Pending", status=stuck)])
    assert (pulling.reason, pulling.message) == ("ImagePullBackOff", "no such image")
    creating = {
        "containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    }
    (starting,) = children([], [pod(0, "Pending", status=creating)])
    assert starting.reason == ""


def test_gpus_are_counted_whatever_the_vendor() -> None:
    assert gpus_of(pod(resources={"limits": {"nvidia.com/gpu": "4", "memory": "1Gi"}})) == 4
    assert gpus_of(pod(resources={"limits": {"amd.com/gpu": 2}})) == 2
    assert gpus_of(pod()) == 0
