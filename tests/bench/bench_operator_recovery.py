"""A drafter pod dies while many Drafters train: how long until its replacement is created.

On a real API server and job controller, without a node: pods are put in the phases that a kubelet would
report. `p99_s` and `p50_s` are over 50 deaths at 100 running Drafters, from the report of the death to
the Job of the next attempt being there.
"""

import time

from operators import kube
from operators.kube import Kube, Object
from tests.support import operator_bench as bench

_DRAFTERS = "dflash.dev/role=drafter"


def run(quick: bool) -> dict[str, float]:
    """100 Drafters, 50 deaths; twice that in full."""
    count, deaths = (100, 50) if quick else (200, 100)
    with bench.control_plane() as api:
        bench.declare(api, count)
        operator = bench.Operator("training")
        try:
            pods = bench.until("all drafter pods", lambda: _pods(api, count), 300, 1.0)
            for pod in pods:
                _report(api, pod, {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "Running")
            time.sleep(3)
            delays = [_death(api, pod) for pod in pods[:deaths]]
        finally:
            operator.stop()
    return {"p99_s": bench.percentile(delays, 0.99), "p50_s": bench.percentile(delays, 0.5)}


def _pods(api: Kube, count: int) -> list[Object]:
    found = api.list(kube.PODS, bench.NAMESPACE, _DRAFTERS)[0]
    return found if len(found) == count else []


def _report(api: Kube, pod: Object, state: Object, phase: str) -> None:
    container = {
        "name": "main",
        "state": state,
        "ready": phase == "Running",
        "image": "none",
        "imageID": "",
        "restartCount": 0,
    }
    status = {"status": {"phase": phase, "containerStatuses": [container]}}
    api.patch(kube.PODS, bench.NAMESPACE, pod["metadata"]["name"], status, "status")


def _death(api: Kube, pod: Object) -> float:
    """Seconds from a killed container being reported to the next attempt's Job."""
    drafter, attempt = (pod["metadata"]["labels"][f"dflash.dev/{key}"] for key in ("drafter", "attempt"))
    following = f"dflash.dev/drafter={drafter},dflash.dev/role=drafter,dflash.dev/attempt={int(attempt) + 1}"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ended = {"exitCode": 137, "reason": "Error", "startedAt": "2026-01-01T00:00:00Z", "finishedAt": now}
    started = time.monotonic()
    _report(api, pod, {"terminated": ended}, "Failed")
    bench.until("the next attempt", lambda: api.list(kube.JOBS, bench.NAMESPACE, following)[0], 60, 0.01)
    return time.monotonic() - started
