"""Training end to end with real processes."""

from pathlib import Path

from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from tests.support.training import TrainingRun


def test_a_run_ends_with_an_export(s3_server: EmbeddedStore, store: Store, tmp_path: Path) -> None:
    with TrainingRun(s3_server, store, tmp_path) as run:
        run.complete()
        print(run.summary(), run.heartbeat(), run.checkpoints())
