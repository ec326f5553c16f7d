"""From `helm install` to a promoted drafter in real pods, and what a change of the declaration reruns."""

from tests.cluster.conftest import small_drafter
from tests.cluster.release import Release


def test_a_drafter_is_made_in_pods_and_edits_rerun_only_what_they_must(release: Release) -> None:
    release.apply(small_drafter(training={"targets": 2, "drafters": 2}))
    release.wait_condition("tiny", "Accepted", "True", 30)
    release.wait_condition("tiny", "Ready", "True", 300)
    release.kubectl("wait", "--for=condition=Ready", "drafter/tiny", "--timeout=5s")
    status = release.status("tiny")
    assert status["phase"] == "Ready"
    assert status["artifact"]["promoted"]
    assert float(status["acceptanceLength"]) >= 1.0
    first = release.jobs("tiny")
    assert sorted(name.split("-")[1] for name in first) == ["dft", "eval", "gen", "tgt"]

    table = release.kubectl("get", "drafters")
    assert table.split("\n")[0].split() == [
        "NAME", "STAGE", "PHASE", "PROGRESS", "ACCEPTANCE", "ATTEMPT", "READY", "AGE",
    ]  # fmt: skip
    assert "True" in table
    logs = release.kubectl("logs", "-l", "dflash.dev/drafter=tiny,dflash.dev/role=drafter", "--prefix")
    assert logs.count("[pod/") > 2
