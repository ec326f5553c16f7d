"""What stands still, and what goes on, while the API server, the store, the Lease or a Service is away.

The Drafter's only pod sleeps: nothing here depends on how fast this machine computes.
"""

import time

import psutil
import pytest

from tests.cluster.conftest import small_drafter
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def sleeper(module_release: Release) -> Release:
    sleep = {"name": "main", "command": ["/bin/sh", "-c", "sleep 900", "--"]}
    module_release.apply(small_drafter("sleeper", pods={"generate": {"spec": {"containers": [sleep]}}}))
    module_release.wait("its pod", lambda: _running(module_release), 60, "sleeper")
    return module_release


def _running(release: Release) -> list[str]:
    return [p["metadata"]["uid"] for p in release.pods("sleeper") if p["status"]["phase"] == "Running"]


def _acted_on(release: Release, samples: int) -> None:
    """An edit is observed: the operator is at work."""
    patch = f'{{"spec":{{"evaluation":{{"samples":{samples}}}}}}}'
    release.kubectl("patch", "drafter", "sleeper", "--type=merge", "-p", patch)
    generation = release.get("drafter", "sleeper")["metadata"]["generation"]
    release.wait(
        "the edit to be observed",
        lambda: release.status("sleeper").get("observedGeneration") == generation,
        120,
        "sleeper",
    )


def test_the_api_server_may_be_away(sleeper: Release) -> None:
    jobs, pods = sleeper.jobs("sleeper"), _running(sleeper)
    sleeper.cluster.stop_process("kube-apiserver")
    time.sleep(30)
    sleeper.cluster.start_api_server()
    _acted_on(sleeper, 11)
    assert sleeper.jobs("sleeper") == jobs
    assert _running(sleeper) == pods
    status = sleeper.status("sleeper")
    assert (status["restarts"], status["disruptions"]) == (0, 0)


def test_the_store_may_be_away(sleeper: Release) -> None:
    jobs = sleeper.jobs("sleeper")
    (server,) = (
        p
        for p in psutil.process_iter(["cmdline"])
        if {"server", "-ip.bind=0.0.0.0"} <= set(p.info["cmdline"] or [])
    )
    server.suspend()
    try:
        condition = sleeper.wait_condition("sleeper", "Reconciling", "True", 120, "StoreUnreachable")
        assert "s3" in condition["message"].lower()
        assert sleeper.condition("sleeper", "Stalled")["status"] == "False"
    finally:
        server.resume()
    sleeper.wait(
        "the store to be looked at again",
        lambda: sleeper.condition("sleeper", "Reconciling")["reason"] != "StoreUnreachable",
        180,
        "sleeper",
    )
    assert sleeper.jobs("sleeper") == jobs


def test_the_lease_and_a_service_may_be_deleted(sleeper: Release) -> None:
    jobs = sleeper.jobs("sleeper")
    sleeper.kubectl("delete", "lease", "dflash-operator")
    sleeper.wait(
        "a lease again", lambda: "dflash-operator" in sleeper.kubectl("get", "leases", "-o", "name"), 30
    )
    (name,) = jobs
    sleeper.kubectl("delete", "service", name)
    sleeper.wait("its Service again", lambda: name in sleeper.kubectl("get", "services", "-o", "name"), 60)
    _acted_on(sleeper, 12)
    assert sleeper.jobs("sleeper") == jobs


def test_a_deleted_job_is_made_again_and_an_evicted_pod_is_replaced(sleeper: Release) -> None:
    (name, uid) = next(iter(sleeper.jobs("sleeper").items()))
    sleeper.kubectl("delete", "job", name, "--wait=false")
    sleeper.wait("another Job", lambda: sleeper.jobs("sleeper").get(name, uid) != uid, 90, "sleeper")
    (pod,) = sleeper.wait("its pod", lambda: sleeper.pods("sleeper"), 60, "sleeper")
    sleeper.wait("it to run", lambda: _running(sleeper), 60, "sleeper")
    evicted = pod["metadata"]["name"]
    eviction = f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{evicted}"}}}}'
    path = f"/api/v1/namespaces/{sleeper.namespace}/pods/{evicted}/eviction"
    sleeper.kubectl("create", "--raw", path, "-f", "-", stdin=eviction)
    sleeper.wait(
        "another pod",
        lambda: [p for p in sleeper.pods("sleeper") if p["metadata"]["name"] != evicted],
        120,
        "sleeper",
    )
    status = sleeper.status("sleeper")
    assert status["restarts"] == 0
    assert status["disruptions"] >= 1
    assert status["phase"] != "Stalled"
