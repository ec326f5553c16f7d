"""`python -m jobs.target`: serves hidden states to the drafters of a run."""

import logging

from dflash.training.control import Control
from jobs.outcome import exit_with_outcome
from jobs.settings import TargetSettings


def run() -> None:
    """Serve until the run is exported."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = TargetSettings.read()
    control = Control()

    def work() -> None:
        from dflash.training.serve import serve

        serve(
            settings.load_resource(),
            settings.run,
            settings.index,
            bind=settings.bind,
            advertise=settings.advertise,
            control=control,
        )

    control.run(work)


def main() -> None:
    """Entry point."""
    exit_with_outcome(run)


if __name__ == "__main__":
    main()
