"""From `helm install` to a promoted drafter in real pods, and what a change of the declaration reruns.

One release for the module. Its Drafters use one place in the store, so that one finds what another has
made.
"""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Object, small_drafter
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(900)

LONG = {"epochs": 400, "checkpoint": {"everySteps": 10, "everyMinutes": 0.2}, "progressDeadlineSeconds": 300}
"""A training that goes on until it is stopped."""


def declared(name: str, **spec: object) -> Object:
    return small_drafter(name, storage={"uri": "s3://dflash/stages"}, **spec)


@pytest.fixture
def stopped(module_release: Release) -> Iterator[Release]:
    """The release; what a test has declared is removed after it."""
    yield module_release
    module_release.kubectl("delete", "drafters", "--all", "--timeout=90s")


def test_a_drafter_is_made_in_pods_and_an_edit_reruns_only_what_it_must(stopped: Release) -> None:
    release = stopped
    release.apply(declared("tiny", training={"targets": 2, "drafters": 2}))
    release.wait_condition("tiny", "Accepted", "True", 30)
    release.wait_condition("tiny", "Ready", "True", 400)
    release.kubectl("wait", "--for=condition=Ready", "drafter/tiny", "--timeout=5s")
    status = release.status("tiny")
    assert status["phase"] == "Ready"
    assert status["artifact"]["promoted"]
    assert float(status["acceptanceLength"]) >= 1.0
    assert [s["state"] for s in status["stages"]] == ["Done"] * 3
    first = release.jobs("tiny")
    assert {name.split("-")[1] for name in first} >= {"dft", "eval", "gen"}

    table = release.kubectl("get", "dfd").splitlines()
    assert table[0].split() == ["NAME", "STAGE", "PHASE", "PROGRESS", "ACCEPTANCE", "ATTEMPT", "READY", "AGE"]
    assert table[1].split()[:3] == ["tiny", "done", "Ready"]
    logs = release.kubectl("logs", "-l", "dflash.dev/drafter=tiny,dflash.dev/role=drafter", "--prefix")
    assert "pod/tiny-dft-" in logs
    assert "exported" in logs
    events = release.events("tiny")
    assert [e for e in events if e in ("DatasetReady", "Trained", "Evaluated", "Ready")] == [
        "DatasetReady", "Trained", "Evaluated", "Ready",
    ]  # fmt: skip

    release.apply(declared("tiny", training={"targets": 2, "drafters": 2}, evaluation={"samples": 2}))
    release.wait_condition("tiny", "Ready", "False", 30)
    release.wait_condition("tiny", "Ready", "True", 200)
    second = release.jobs("tiny")
    assert [name.split("-")[1] for name in set(second) - set(first)] == ["eval"]

    release.apply(declared("tiny", training={"targets": 2, "drafters": 2}))
    generation = release.get("drafter", "tiny")["metadata"]["generation"]
    release.wait(
        "the first spec to be Ready again",
        lambda: (
            release.condition("tiny", "Ready").get("observedGeneration") == generation
            and release.condition("tiny", "Ready")["status"] == "True"
        ),
        60,
        "tiny",
    )
    assert set(release.jobs("tiny").values()) <= set(second.values())

    # Another Drafter that asks for the same finds everything there: nothing runs, and it is promoted.
    release.apply(declared("twin", training={"targets": 2, "drafters": 2}))
    release.wait_condition("twin", "Ready", "True", 60)
    assert release.jobs("twin") == {}


def test_training_survives_its_pods_and_suspension_and_resumes_from_its_checkpoint(stopped: Release) -> None:
    release = stopped
    release.apply(declared("long", training=LONG))
    started = release.wait("a first step", lambda: _step(release) > 0, 300, "long")
    assert started
    assert release.status("long")["attempt"] == 0

    # A target is replaced on its own; the drafters go on.
    (target,) = release.pods("long", "target")
    release.kubectl("delete", "pod", target["metadata"]["name"], "--wait=false")
    release.wait(
        "another target",
        lambda: [
            p for p in release.pods("long", "target") if p["metadata"]["uid"] != target["metadata"]["uid"]
        ],
        90,
        "long",
    )
    assert release.status("long")["attempt"] == 0

    # A drafter that dies ends its attempt; the next one starts when nothing of it lives.
    (drafter,) = release.pods("long", "drafter")
    release.kubectl("delete", "pod", drafter["metadata"]["name"], "--wait=false")
    release.wait("attempt 1", lambda: release.status("long")["attempt"] == 1, 60, "long")
    release.wait("a pod of attempt 1", lambda: _attempts(release) == ["1"], 60, "long")
    assert release.status("long")["disruptions"] == 2, "the target's and the drafter's"
    failure = release.status("long")["lastFailure"]
    assert (failure["role"], failure["index"], failure["attempt"]) == ("drafter", 0, 0)
    release.wait("a step of attempt 1", lambda: _step(release, attempt=1) > 0, 200, "long")

    # The operator may die: what runs goes on, and nothing is started again.
    before = release.jobs("long")
    release.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=60s")
    release.kubectl("rollout", "status", "deployment/dflash-operator", "--timeout=120s", timeout=150)
    reached = _step(release)
    release.wait("steps after the operator's death", lambda: _step(release) > reached, 90, "long")
    assert release.jobs("long") == before

    # Suspension frees all pods and spends nothing; resuming goes on from the checkpoint.
    committed = _checkpointed(release)
    _suspend(release, True)
    release.wait_condition("long", "Suspended", "True", 60, "Suspended")
    release.wait("no pods", lambda: not release.pods("long"), 60, "long")
    status = release.status("long")
    assert (status["phase"], status["restarts"], status["disruptions"]) == ("Suspended", 0, 2)
    _suspend(release, False)
    release.wait("attempt 2 to run", lambda: _attempts(release) == ["2"], 60, "long")
    release.wait("a step of attempt 2", lambda: _step(release, attempt=2) > 0, 200, "long")
    (pod,) = release.pods("long", "drafter")
    logs = release.kubectl("logs", pod["metadata"]["name"])
    resumed = int(logs.split(", step ")[1].split(" of ")[0])
    assert resumed >= committed > 0
    assert _step(release) >= resumed


def _suspend(release: Release, suspend: bool) -> None:
    patch = json.dumps({"spec": {"suspend": suspend}})
    release.kubectl("patch", "drafter", "long", "--type=merge", "-p", patch)


def _attempts(release: Release) -> list[str]:
    """Attempts of the drafter pods that live; never of two attempts at once."""
    found = sorted({p["metadata"]["labels"]["dflash.dev/attempt"] for p in release.pods("long", "drafter")})
    assert len(found) <= 1, found
    return found


def _step(release: Release, attempt: int = 0) -> int:
    """Steps done, as the status has it, once it speaks of that attempt."""
    status = release.status("long")
    if status.get("attempt", 0) < attempt or not status.get("progress"):
        return 0
    if attempt and not release.pods("long", "drafter"):
        return 0
    return int(status["progress"]["done"])


def _checkpointed(release: Release) -> int:
    """Step of the newest checkpoint, by the drafter's own log."""
    (pod,) = release.pods("long", "drafter")
    lines = release.kubectl("logs", pod["metadata"]["name"]).splitlines()
    steps = [
        int(line.split("checkpoint of step ")[1].split()[0]) for line in lines if "checkpoint of step" in line
    ]
    return max(steps, default=0)
