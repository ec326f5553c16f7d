"""`python -m jobs.drafter`: one rank of the group that trains the drafter."""

import logging
import os
import tempfile
from pathlib import Path

from dflash.training.control import Control
from jobs.outcome import exit_with_outcome
from jobs.settings import DrafterSettings


def run() -> None:
    """Train this rank's share until the export is committed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = DrafterSettings.read()
    control = Control()

    def work() -> None:
        from dflash.training.run import Part, train

        part = Part(
            settings.dataset,
            settings.run,
            settings.attempt,
            settings.rank,
            settings.world,
            settings.rendezvous,
            _metrics_folder(settings),
        )
        train(settings.load_resource(), part, control)

    control.run(work)


def _metrics_folder(settings: DrafterSettings) -> Path:
    """Beside the resource file, or, where that is read-only as in a pod, in a temporary folder."""
    beside = settings.resource.absolute().parent
    if os.access(beside, os.W_OK):
        return beside / f"metrics-{settings.run}"
    return Path(tempfile.gettempdir()) / f"dflash-metrics-{settings.run}"


def main() -> None:
    """Entry point."""
    exit_with_outcome(run)


if __name__ == "__main__":
    main()
