"""What goes wrong on a cluster, and what is told of it: condition, reason, message, budget, outcome.

All Drafters of the module are declared at once, since most of the time is waiting for pods.
"""

import pytest

from tests.cluster.conftest import Object, small_drafter
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(600)

LIMITS = {"startupDeadlineSeconds": 30, "maxRestarts": 0}


def generating(name: str, patch: Object | None = None, **spec: object) -> Object:
    """A Drafter whose generation pods differ by a patch of the main container or of the pod."""
    return small_drafter(name, pods={"generate": {"spec": patch or {}}}, **spec)


def main(**fields: object) -> Object:
    return {"containers": [{"name": "main", **fields}]}


def _read_only_key(release: Release) -> None:
    """A key of the store that may read and not write, in a Secret."""
    add = "s3.configure -user reader -access_key reader -secret_key reader-secret -actions Read,List -apply"
    (pod,) = release.objects("pods", "app.kubernetes.io/component=s3")
    shell = f"echo '{add}' | {pod['spec']['containers'][0]['command'][0]} shell"
    release.kubectl("exec", pod["metadata"]["name"], "--", "/bin/sh", "-c", shell)
    keys = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
    literals = [f"--from-literal={name}={value}" for name, value in keys.items()]
    release.kubectl("create", "secret", "generic", "read-only", *literals)


@pytest.fixture(scope="module")
def troubled(release: Release) -> Release:
    for drafter in (
        generating("unschedulable", {"nodeSelector": {"no": "such-node"}}),
        generating("no-image", main(image="localhost/no-such-image:1"), training=LIMITS),
        generating("no-memory", main(resources={"limits": {"memory": "64Mi"}})),
        generating("no-secret", storage={"uri": "s3://dflash/no-secret", "secretRef": "no-such-secret"}),
        generating("wrong-key", main(env=[{"name": "AWS_SECRET_ACCESS_KEY", "value": "wrong"}])),
        generating("no-target", target={"model": "/files/no-such-folder"}),
        generating("no-prompts", prompts={"uri": "/files/no-such-file.jsonl"}),
        generating("no-store", storage={"uri": "s3://dflash/x", "endpoint": "http://127.0.0.1:9"}),
        generating(
            "fails-once", main(command=["/bin/sh", "-c", "exit 1", "--"]), training={"maxRestarts": 1}
        ),
    ):
        release.apply(drafter)
    return release


def test_a_pod_without_a_place_is_queued_with_the_schedulers_words(troubled: Release) -> None:
    condition = troubled.wait_condition("unschedulable", "DatasetReady", "False", 60, "Unschedulable")
    assert "node" in condition["message"]
    status = troubled.status("unschedulable")
    assert status["phase"] == "Queued"
    assert (status["restarts"], status["disruptions"]) == (0, 0)
    assert status["stages"][0]["state"] == "Pending"


def test_an_image_that_cannot_be_pulled_is_named_and_given_up_after_its_deadline(troubled: Release) -> None:
    condition = troubled.wait_condition("no-image", "Stalled", "True", 120, "RestartsExhausted")
    assert "ImagePull" in condition["message"]
    assert "no-such-image" in condition["message"]
    troubled.wait("no pods", lambda: not troubled.pods("no-image"), 60, "no-image")
    assert troubled.status("no-image")["lastFailure"]["reason"] == "StartupDeadlineExceeded"


def test_out_of_memory_stalls_at_once_and_says_what_to_raise(troubled: Release) -> None:
    condition = troubled.wait_condition("no-memory", "Stalled", "True", 120, "OOMKilled")
    assert "64Mi" in condition["message"]
    failure = troubled.status("no-memory")["lastFailure"]
    assert (failure["reason"], failure["role"], failure["exitCode"]) == ("OOMKilled", "generate", 137)
    assert failure["node"]
    assert "OOMKilled" in troubled.events("no-memory")


def test_a_secret_that_is_not_there_is_named(troubled: Release) -> None:
    condition = troubled.wait_condition(
        "no-secret", "DatasetReady", "False", 60, "CreateContainerConfigError"
    )
    assert "no-such-secret" in condition["message"]


def test_wrong_credentials_and_a_missing_target_are_never_tried_again(troubled: Release) -> None:
    for name, words in (("wrong-key", "AWS_ACCESS_KEY_ID"), ("no-target", "no-such-folder")):
        condition = troubled.wait_condition(name, "Stalled", "True", 150, "ConfigurationError")
        assert condition["message"].count("ConfigurationError") == 1
        failure = troubled.status(name)["lastFailure"]
        assert failure["exitCode"] == 78
        assert words in failure["message"], failure
        assert len(troubled.pods(name, alive=False)) <= 1, "nothing was tried twice"
        assert troubled.status(name)["phase"] == "Stalled"


def test_a_store_that_may_not_be_written_is_never_tried_again(release: Release) -> None:
    _read_only_key(release)
    release.apply(generating("read-only", storage={"uri": "s3://dflash/only", "secretRef": "read-only"}))
    condition = release.wait_condition("read-only", "Stalled", "True", 150, "ConfigurationError")
    assert "AccessDenied" in condition["message"]
    assert release.status("read-only")["lastFailure"]["exitCode"] == 78


def test_prompts_that_are_not_there_make_the_spec_invalid(troubled: Release) -> None:
    condition = troubled.wait_condition("no-prompts", "Accepted", "False", 60, "Invalid")
    assert "no-such-file.jsonl" in condition["message"]
    assert troubled.condition("no-prompts", "Stalled")["status"] == "True"
    assert troubled.status("no-prompts")["observedGeneration"] == 1
    assert troubled.jobs("no-prompts") == {}


def test_a_store_that_is_away_is_told_and_waited_for(troubled: Release) -> None:
    condition = troubled.wait_condition("no-store", "Reconciling", "True", 90, "StoreUnreachable")
    assert "127.0.0.1:9" in condition["message"]
    assert troubled.condition("no-store", "Stalled").get("status") != "True"
    assert troubled.jobs("no-store") == {}


def test_an_unknown_failure_spends_restarts_and_then_stalls(troubled: Release) -> None:
    condition = troubled.wait_condition("fails-once", "Stalled", "True", 150, "RestartsExhausted")
    assert "exit code 1" in condition["message"]
    assert troubled.status("fails-once")["restarts"] == 2
    troubled.wait("no pods", lambda: not troubled.pods("fails-once"), 60, "fails-once")


def test_an_edit_gives_a_stalled_drafter_a_fresh_try(troubled: Release) -> None:
    troubled.wait_condition("no-memory", "Stalled", "True", 120, "OOMKilled")
    troubled.apply(generating("no-memory", main(resources={"limits": {"memory": "3Gi"}})))
    troubled.wait_condition("no-memory", "DatasetReady", "True", 150)
    assert troubled.status("no-memory")["lastFailure"]["reason"] == "OOMKilled", (
        "what happened stays to be read"
    )
    troubled.kubectl("delete", "drafter", "no-memory", "--timeout=60s")
    troubled.wait("no pods of a deleted Drafter", lambda: not troubled.pods("no-memory", alive=False), 60)
