"""An operator that is killed and started again with many ready Drafters: when it has caught up, at what cost.

`seconds` is from its start to all Drafters being known and none being due; `reads_per_drafter` counts
requests to the API server that read.
"""

import time

from tests.support import operator_bench as bench

_READY = 'dflash_drafters{phase="Ready"}'


def run(quick: bool) -> dict[str, float]:
    """1,000 Drafters, or 5,000 in full."""
    count = 1000 if quick else 5000
    with bench.control_plane() as api:
        bench.declare(api, count)
        first = bench.Operator("ready")
        bench.until("every Drafter to be Ready", lambda: first.metrics().get(_READY) == count, 600, 1.0)
        first.stop()
        started = time.monotonic()
        second = bench.Operator("ready")
        try:

            def caught_up() -> bool:
                found = second.metrics()
                looked = second.looks() >= count
                return found.get(_READY) == count and looked and found["dflash_operator_queue_length"] == 0

            bench.until("the operator to catch up", caught_up, 300)
            seconds = time.monotonic() - started
            reads = second.requests("GET", "WATCH")
        finally:
            second.stop()
    return {"seconds": seconds, "reads_per_drafter": reads / count}
