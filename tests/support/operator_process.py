"""The operator's real process over a store that is told what to say: for measuring the operator alone.

    python -m tests.support.operator_process FILE

FILE is JSON with one of {"stage": "ready"} (everything is committed and promoted), or {"stage":
"training"} (only the dataset is). Everything else is as in `python -m operators`.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from dflash.resource import Drafter
from dflash.resource.hashes import stage_hashes
from operators.actions import Promote
from operators.kube import Kube
from operators.manager import Manager
from operators.observed import Committed, Stage
from operators.settings import OperatorSettings
from operators.view import Look, StoreView


class ToldView(StoreView):
    """Answers at once; names outputs as the real one does."""

    def __init__(self, stage: str) -> None:
        super().__init__("told")
        self._done = stage == "ready"

    def look(self, drafter: Drafter, uid: str, at_work: Iterable[Stage], *, take_over: bool = False) -> Look:
        hashes = stage_hashes(drafter.spec, prompts="p", target="t")
        done = self._done
        committed = Committed(dataset=True, export=done, evaluation=done, promoted=done)
        return Look(hashes, committed, {}, {})

    def describe(self, drafter: Drafter, uid: str, stage: Stage) -> None:
        return

    def promote(self, drafter: Drafter, action: Promote) -> None:
        return


def main() -> None:
    """Run until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    stage = json.loads(Path(sys.argv[1]).read_text())["stage"]
    manager = Manager(Kube.connect(), OperatorSettings(), ToldView(stage))
    signal.signal(signal.SIGTERM, lambda *_: manager.stop())
    kept = manager.run()
    os._exit(0 if kept else 1)


if __name__ == "__main__":
    main()
