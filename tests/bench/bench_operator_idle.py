"""An operator with many ready Drafters: what it costs while nothing changes, and how soon it sees an edit.

On a real API server, with the store told to say that all is committed. `writes` to the API server and
`cpu_share` (of one core) are over the idle window, `rss_mib` at its end; `edit_p99_s` is from an edit to
its generation being observed in the status.
"""

import time

from operators import kube
from tests.support import operator_bench as bench

_READY = 'dflash_drafters{phase="Ready"}'


def run(quick: bool) -> dict[str, float]:
    """1,000 Drafters; the idle window is 60 s, or 600 s in full."""
    count, window = 1000, 60.0 if quick else 600.0
    with bench.control_plane() as api:
        bench.declare(api, count)
        operator = bench.Operator("ready")
        try:
            bench.until(
                "every Drafter to be Ready", lambda: operator.metrics().get(_READY) == count, 600, 1.0
            )
            time.sleep(5)
            cpu = operator.usage.cpu_times()
            writes = operator.requests("POST", "PATCH", "PUT", "DELETE")
            renewals = operator.requests("PUT")
            time.sleep(window)
            after = operator.usage.cpu_times()
            wrote = operator.requests("POST", "PATCH", "PUT", "DELETE") - writes
            # The Lease is renewed every 2 s: that is what PUT is used for, and nothing else.
            wrote -= operator.requests("PUT") - renewals
            busy = (after.user + after.system) - (cpu.user + cpu.system)
            rss = operator.usage.memory_info().rss / 2**20
            delays = [_edit(api, number) for number in range(100)]
        finally:
            operator.stop()
    return {
        "writes": wrote,
        "rss_mib": rss,
        "cpu_share": busy / window,
        "edit_p99_s": bench.percentile(delays, 0.99),
    }


def _edit(api: kube.Kube, number: int) -> float:
    """Seconds from an edit to its being acted on."""
    name = f"d{number * 7}"
    patch = {"spec": {"evaluation": {"samples": 10 + number}}}
    generation = api.patch(kube.DRAFTERS, bench.NAMESPACE, name, patch)["metadata"]["generation"]
    started = time.monotonic()

    def seen() -> bool:
        status = api.get(kube.DRAFTERS, bench.NAMESPACE, name)["status"]
        return bool(status["observedGeneration"] == generation)

    bench.until("the edit to be observed", seen, 30, 0.01)
    return time.monotonic() - started
