"""What stands still, and what goes on, while the API server, the store, the Lease or a Service is away.

The Drafter's only pod sleeps: nothing here depends on how fast this machine computes.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from operators.kube import DRAFTERS
from tests.cluster import images
from tests.cluster.conftest import small_drafter
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def sleeper(release: Release) -> Release:
    sleep = {"name": "main", "command": ["/bin/sh", "-c", "sleep 900", "--"]}
    pod = {"spec": {"containers": [sleep], "terminationGracePeriodSeconds": 3}}
    release.apply(small_drafter("sleeper", pods={"generate": pod}))
    release.wait("its pod", lambda: _running(release), 60, "sleeper")
    return release


def _running(release: Release) -> list[str]:
    return [p["metadata"]["uid"] for p in release.pods("sleeper") if p["status"]["phase"] == "Running"]


def _store_process(release: Release) -> psutil.Process:
    """The S3 server in the release's pod, as a process of this machine."""
    (pod,) = release.objects("pods", "app.kubernetes.io/component=s3")
    (found,) = (
        p
        for p in psutil.process_iter(["cmdline"])
        if "-ip.bind=0.0.0.0" in (p.info["cmdline"] or [])
        and pod["metadata"]["uid"] in Path(f"/proc/{p.pid}/cgroup").read_text()
    )
    return found


def _acted_on(release: Release, samples: int) -> None:
    """An edit is observed: the operator is at work."""
    generation = release.edit("sleeper", evaluation={"samples": samples})
    release.wait(
        "the edit to be observed",
        lambda: release.status("sleeper").get("observedGeneration") == generation,
        120,
        "sleeper",
    )


def _others_hear_again(release: Release) -> None:
    """Kubernetes' own controllers and the kubelet are at work again: what follows is not about their pauses.

    Between tries they wait up to a minute, and once more when told that their copy is too old.
    """
    pause = {"name": "main", "image": images.BUSYBOX, "command": ["/bin/sleep", "600"]}
    pod = {"containers": [pause], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "after-outage"}}
    release.apply({**about, "spec": {"template": {"spec": pod}}})
    selector = "job-name=after-outage"

    def phases() -> list[str]:
        return [p["status"].get("phase", "") for p in release.objects("pods", selector)]

    release.wait("a Job's pod after the outage", lambda: phases() == ["Running"], 240)
    release.kubectl("delete", "job", "after-outage", "--cascade=foreground", "--wait=false")
    release.wait("that pod to go", lambda: not phases(), 240)


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
    _others_hear_again(sleeper)


def test_the_store_may_be_away(sleeper: Release) -> None:
    jobs = sleeper.jobs("sleeper")
    server = _store_process(sleeper)
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


def test_a_person_may_stop_and_go_on_while_the_operator_writes(sleeper: Release) -> None:
    api = sleeper.api()

    def toggle(number: int) -> None:
        api.patch(DRAFTERS, sleeper.namespace, "sleeper", {"spec": {"suspend": number % 2 == 0}})

    with ThreadPoolExecutor(8) as people:
        list(people.map(toggle, range(100)))  # none is refused
    generation = sleeper.edit("sleeper", suspend=True)
    condition = sleeper.wait_condition("sleeper", "Suspended", "True", 60, "Suspended")
    assert condition["observedGeneration"] == generation
    sleeper.wait("no pods", lambda: not sleeper.pods("sleeper", alive=False), 60, "sleeper")
    sleeper.edit("sleeper", suspend=False)
    sleeper.wait("its pod", lambda: _running(sleeper), 60, "sleeper")
    status = sleeper.status("sleeper")
    assert (status["restarts"], status["disruptions"]) == (0, 0)


def test_a_pod_has_shared_memory_as_declared_and_no_token(sleeper: Release) -> None:
    (pod,) = sleeper.pods("sleeper")
    inside = "df -k /dev/shm; ls /var/run/secrets/kubernetes.io 2>&1; id -u"
    told = sleeper.kubectl("exec", pod["metadata"]["name"], "--", "/bin/sh", "-c", inside)
    assert str(256 * 1024) in told, told
    assert "No such file" in told
    assert told.split()[-1] == "1000"


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
