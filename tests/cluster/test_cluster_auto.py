"""`targets: auto` with targets that are too slow for their drafter: one move is made, and it helps. Soak."""

import time

import pytest

from tests.cluster.conftest import small_drafter
from tests.cluster.release import Release

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SHARE = "200m"
"""Of a core, for each target: less than half of what the drafter could use."""


def test_slow_targets_get_another_and_training_goes_faster_undisturbed(release: Release) -> None:
    limited = {"containers": [{"name": "main", "resources": {"limits": {"cpu": SHARE}}}]}
    training = {"targets": "auto", "minTargets": 1, "maxTargets": 2, "epochs": 1000}
    release.apply(small_drafter("auto", training=training, pods={"target": {"spec": limited}}))

    def rate() -> float:
        """Samples a second while the targets are the bottleneck; 0 before that is known."""
        progress = release.status("auto").get("progress") or {}
        return float((progress.get("figures") or {}).get("samples_per_second", 0))

    release.wait("training", lambda: rate() > 0, 400, "auto")
    release.wait("another target", lambda: len(release.pods("auto", "target")) == 2, 200, "auto")
    slow = 0.0
    for _ in range(8):  # seconds in which the second one still imports its libraries
        slow = max(slow, rate())
        time.sleep(1.0)
    before = release.jobs("auto")
    release.wait(f"more than {1.3 * slow:.0f} samples a second", lambda: rate() > 1.3 * slow, 240, "auto")
    print(f"{slow:.0f} samples a second with one target, {rate():.0f} with two")
    assert len(release.pods("auto", "target")) == 2
    assert release.jobs("auto") == before
    status = release.status("auto")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (0, 0, 0)
