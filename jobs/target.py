"""`python -m jobs.target`: serves hidden states to the drafters of a run."""

import logging
import sys

from dflash.training.control import Control
from jobs.outcome import exit_with_outcome
from jobs.settings import TargetSettings


def run() -> None:
    """Serve until the run is exported."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = TargetSettings.read()
    if settings.rank > 0:
        from dflash.training.tensor_parallel import follow

        follow(settings.load_resource(), settings.rank, settings.leader_port)
        return
    control = Control()

    def follower(rank: int, port: int) -> list[str]:
        """This very command line, as another rank."""
        more = ["--rank", str(rank), "--leader-port", str(port)]
        return [sys.executable, "-m", "jobs.target", *sys.argv[1:], *more]

    def work() -> None:
        from dflash.training.serve import serve

        serve(
            settings.load_resource(),
            settings.run,
            settings.index,
            bind=settings.bind,
            advertise=settings.advertise,
            control=control,
            follower=follower,
        )

    control.run(work)


def main() -> None:
    """Entry point."""
    exit_with_outcome(run)


if __name__ == "__main__":
    main()
