"""From `helm install` to a promoted drafter in real pods, and what a change of the declaration reruns.

The Drafters use one place in the store, so that one finds what another has made.
"""

import json
import re
from functools import partial

import pytest

from dflash.storage.store import NotFound
from tests.cluster.conftest import Object, small_drafter
from tests.cluster.release import Release
from tests.cluster.watching import one_attempt_at_a_time

pytestmark = pytest.mark.timeout(900)

TINY = "a-drafter-with-the-longest-name-there-is"  # 40 characters
TWO_AND_TWO = {"targets": 2, "drafters": 2}
LONG = {"epochs": 400, "checkpoint": {"everySteps": 10, "everyMinutes": 0.2}, "progressDeadlineSeconds": 300}
"""A training that goes on until it is stopped."""


def declared(name: str, **spec: object) -> Object:
    return small_drafter(name, storage={"uri": "s3://dflash/stages"}, **spec)


def stages(jobs: dict[str, str]) -> list[str]:
    """Which kinds of Jobs these are."""
    return sorted({re.findall(r"-(gen|tgt|dft|eval)-", name)[-1] for name in jobs})


def new(release: Release, drafter: str, before: dict[str, str]) -> dict[str, str]:
    return {name: uid for name, uid in release.jobs(drafter).items() if name not in before}


def test_a_drafter_is_made_in_pods_and_an_edit_reruns_only_what_it_must(release: Release) -> None:
    assert len(TINY) == 40
    drafter = declared(TINY, training=TWO_AND_TWO)
    release.apply(drafter)
    release.wait_condition(TINY, "Accepted", "True", 30)
    release.wait_condition(TINY, "Ready", "True", 400)
    release.kubectl("wait", "--for=condition=Ready", f"drafter/{TINY}", "--timeout=5s")
    status = release.status(TINY)
    assert status["phase"] == "Ready"
    assert status["artifact"]["promoted"]
    assert float(status["acceptanceLength"]) >= 1.0
    assert [s["state"] for s in status["stages"]] == ["Done"] * 3
    assert (status["restarts"], status["disruptions"]) == (0, 0)
    first = release.jobs(TINY)
    assert {"dft", "eval", "gen"} <= set(stages(first))

    table = release.kubectl("get", "dfd").splitlines()
    assert table[0].split() == ["NAME", "STAGE", "PHASE", "PROGRESS", "ACCEPTANCE", "ATTEMPT", "READY", "AGE"]
    assert [TINY, "done", "Ready"] in [line.split()[:3] for line in table]
    logs = release.kubectl("logs", "-l", f"dflash.dev/drafter={TINY},dflash.dev/role=drafter", "--prefix")
    assert "exported" in logs
    told = ("DatasetReady", "Trained", "Evaluated", "Ready")
    assert [e for e in release.events(TINY) if e in told] == list(told)
    # Nothing of the declaration was touched: a second sync has nothing to do.
    release.kubectl("diff", "-f", "-", stdin=json.dumps(drafter))

    release.edit(TINY, evaluation={"samples": 2})
    release.wait_condition(TINY, "Ready", "False", 30)
    release.wait_condition(TINY, "Ready", "True", 200)
    second = release.jobs(TINY)
    assert stages(new(release, TINY, first)) == ["eval"]

    # Another training has the same dataset; a rerun has another one.
    release.edit(TINY, training={"epochs": 3})
    release.wait("other drafters", lambda: "dft" in stages(new(release, TINY, second)), 60, TINY)
    assert "gen" not in stages(new(release, TINY, second))
    third = release.jobs(TINY)
    release.edit(TINY, rerun="again")
    release.wait("another dataset", lambda: stages(new(release, TINY, third)) == ["gen"], 60, TINY)

    release.apply(drafter)
    generation = release.edit(TINY, rerun="", evaluation={"samples": 3})
    fourth = {**release.jobs(TINY)}
    release.wait(
        "the first spec to be Ready again",
        lambda: (
            release.condition(TINY, "Ready").get("observedGeneration") == generation
            and release.condition(TINY, "Ready")["status"] == "True"
        ),
        60,
        TINY,
    )
    assert set(release.jobs(TINY)) <= set(fourth)
    release.wait("what the rerun had begun to be gone", lambda: not release.pods(TINY), 60, TINY)

    # Another Drafter that asks for the same finds everything there: nothing runs, and it is promoted.
    release.apply(declared("twin", training=TWO_AND_TWO))
    release.wait_condition("twin", "Ready", "True", 60)
    assert release.jobs("twin") == {}


def test_training_survives_its_pods_and_suspension_and_resumes_from_its_checkpoint(release: Release) -> None:
    with one_attempt_at_a_time(release.api(), release.namespace, "long") as attempts:
        _live_through(release)
        assert attempts == [0, 1, 2]
    release.kubectl("delete", "drafter", "long", "--timeout=60s")
    release.wait("no pods of a deleted Drafter", lambda: not release.pods("long", alive=False), 60, "long")


def _live_through(release: Release) -> None:
    release.apply(declared("long", training=LONG))
    release.wait("a checkpoint", lambda: _checkpointed(release) > 0, 300, "long")
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
    reached = _step(release)
    release.wait("steps with the other target", lambda: _step(release) > reached, 120, "long")
    assert release.status("long")["attempt"] == 0

    # A drafter that dies ends its attempt; the next one starts when nothing of it lives.
    (drafter,) = release.pods("long", "drafter")
    release.kubectl("delete", "pod", drafter["metadata"]["name"], "--wait=false")
    release.wait("attempt 1", lambda: release.status("long")["attempt"] == 1, 60, "long")
    release.wait("a pod of attempt 1", lambda: _attempt(release) == 1, 60, "long")
    assert release.status("long")["disruptions"] == 2, "the target's and the drafter's"
    failure = release.status("long")["lastFailure"]
    assert (failure["role"], failure["index"], failure["attempt"]) == ("drafter", 0, 0)
    release.wait("steps of attempt 1", lambda: _resumed(release) is not None, 200, "long")

    # The operator may die: what runs goes on, and nothing is started again.
    before = release.jobs("long")
    release.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=60s")
    release.kubectl("rollout", "status", "deployment/dflash-operator", "--timeout=120s", timeout=150)
    reached = _step(release)
    release.wait("steps after the operator's death", lambda: _step(release) > reached, 120, "long")
    assert release.jobs("long") == before

    # Suspension frees all pods and spends nothing; resuming goes on from the checkpoint.
    release.wait("a checkpoint of attempt 1", lambda: _checkpointed(release) > 0, 120, "long")
    committed = _checkpointed(release)
    release.edit("long", suspend=True)
    release.wait_condition("long", "Suspended", "True", 90, "Suspended")
    release.wait("no pods", lambda: not release.pods("long"), 60, "long")
    status = release.status("long")
    assert (status["phase"], status["restarts"], status["disruptions"]) == ("Suspended", 0, 2)
    release.edit("long", suspend=False)
    release.wait("attempt 2 to run", lambda: _attempt(release) == 2, 60, "long")
    resumed = release.wait("steps of attempt 2", lambda: _resumed(release), 200, "long")
    assert resumed >= committed > 0


def test_the_operator_may_be_killed_in_every_stage_and_nothing_runs_twice(release: Release) -> None:
    release.apply(small_drafter("orphan"))
    made: set[tuple[str, str]] = set()
    for role in ("generate", "drafter", "evaluate"):
        release.wait(f"a pod to {role}", partial(release.pods, "orphan", role), 200, "orphan")
        made |= set(release.jobs("orphan").items())
        # SIGKILL: the Lease is not released, so the next one has to wait until it has expired.
        operator = ("pod", "-l", "app.kubernetes.io/component=operator")
        release.kubectl("delete", *operator, "--grace-period=0", "--force")
    release.wait_condition("orphan", "Ready", "True", 200)
    made |= set(release.jobs("orphan").items())
    assert stages(dict(made)) == ["dft", "eval", "gen", "tgt"]
    assert len(made) == 4, "none was made twice"
    status = release.status("orphan")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (0, 0, 0)


def test_a_drafter_out_of_memory_releases_the_targets_and_says_what_to_raise(release: Release) -> None:
    limit = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "64Mi"}}}]}}
    release.apply(declared("narrow", training={"epochs": 5}, pods={"drafter": limit}))
    condition = release.wait_condition("narrow", "Stalled", "True", 240, "OOMKilled")
    assert "64Mi" in condition["message"]
    failure = release.status("narrow")["lastFailure"]
    assert (failure["role"], failure["attempt"], failure["exitCode"]) == ("drafter", 0, 137)
    release.wait("no pods", lambda: not release.pods("narrow"), 60, "narrow")
    assert release.condition("narrow", "Trained")["reason"] == "OOMKilled"


def test_data_goes_with_a_drafter_whose_data_is_to_go_and_with_no_other(release: Release) -> None:
    sleep = {"name": "main", "command": ["/bin/sh", "-c", "sleep 600", "--"]}
    pods = {"generate": {"spec": {"containers": [sleep], "terminationGracePeriodSeconds": 2}}}
    storage = {"uri": "s3://dflash/goes", "deletionPolicy": "Delete"}
    release.apply(small_drafter("goes", storage=storage, pods=pods))
    release.wait("its pod", lambda: release.pods("goes", "generate"), 60, "goes")
    place = release.store("goes")
    written = [info.key for info in place.list()]
    assert any(key.endswith("/inputs.json") for key in written), written
    place.put("prompts/mine.jsonl", b"{}")
    release.kubectl("delete", "drafter", "goes", "--timeout=90s")
    assert [info.key for info in place.list()] == ["prompts/mine.jsonl"]
    assert release.pods("goes") == []
    assert list(release.store("stages").list("datasets/")), "what others made is still there"
    with pytest.raises(NotFound):
        place.get("owners/goes.json")


def _attempt(release: Release) -> int:
    """The attempt of the drafter pod that lives; -1 when there is none."""
    found = {int(p["metadata"]["labels"]["dflash.dev/attempt"]) for p in release.pods("long", "drafter")}
    return max(found, default=-1)


def _step(release: Release) -> int:
    """Steps done, as the status has it."""
    return int((release.status("long").get("progress") or {}).get("done", 0))


def _log(release: Release) -> list[str]:
    """What the living drafter has logged."""
    pods = release.pods("long", "drafter")
    return release.kubectl("logs", pods[0]["metadata"]["name"], check=False).splitlines() if pods else []


def _checkpointed(release: Release) -> int:
    """Step of the newest checkpoint of the living attempt, by the drafter's own log."""
    found = [re.search(r"checkpoint of step (\d+) is committed", line) for line in _log(release)]
    return max((int(m[1]) for m in found if m), default=0)


def _resumed(release: Release) -> int | None:
    """The step from which the living attempt went on, once it has made further ones."""
    lines = _log(release)
    if not any(re.search(r": step \d+ of ", line) for line in lines):
        return None
    found = [re.search(r", step (\d+) of ", line) for line in lines]
    return next((int(m[1]) for m in found if m), None)
