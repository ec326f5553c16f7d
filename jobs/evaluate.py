"""`python -m jobs.evaluate`: measures a trained drafter against plain decoding and writes the report.

Exit 0 also when the gate refuses promotion: the stage is done, and the report says why.
"""

import logging
import signal
from types import FrameType

from dflash.errors import Preempted
from dflash.evaluation.stage import run_stage
from dflash.storage.location import location_of
from dflash.storage.store import Store
from jobs.outcome import exit_with_outcome
from jobs.settings import EvaluateSettings

log = logging.getLogger("dflash")


def main() -> None:
    """Run and leave with an exit code."""
    exit_with_outcome(_run)


def _run() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _stop)
    settings = EvaluateSettings.read()
    resource = settings.load_resource()
    store = Store.open(location_of(resource.spec.storage))
    report = run_stage(
        store, resource, dataset=settings.dataset, drafter=settings.run, evaluation=settings.evaluation
    )
    log.info(
        "acceptance length %.2f pooled, %.2f per response; speed-up %.2f; %s",
        report.acceptance_length.pooled,
        report.acceptance_length.per_response_mean,
        report.speedup,
        "promoted" if report.gate.passed else "not promoted",
    )


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise Preempted("asked to stop; answers measured so far are kept, run again to go on")


if __name__ == "__main__":
    main()
