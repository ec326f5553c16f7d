"""Random kills of targets and drafters in one run: each sample is trained once an epoch, to the same end.

Twenty of them here, two hundred with the soak marker.
"""

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from tests.support.processes import JobProcess
from tests.support.tiny import save_tiny_target
from tests.support.training import TrainingRun

SAMPLES = 30


class Disturber:
    """Two targets and one drafter that are killed and started again until enough was killed."""

    def __init__(self, run: TrainingRun, seed: int, slow: float) -> None:
        self.run, self.random, self.slow = run, random.Random(seed), slow
        self.targets: dict[int, JobProcess] = {index: run.target(index, slow=slow) for index in range(2)}
        self.attempt = 0
        (self.drafter,) = run.drafters(attempt=0)
        self.kills = 0

    def kill_until(self, kills: int) -> None:
        while self.kills < kills and self.drafter.running:
            time.sleep(self.random.uniform(0.2, 1.0))
            if self.random.random() < 0.7:
                index = self.random.randrange(2)
                if self.random.random() < 0.5:  # else wherever it is: starting, loading, at work
                    self._wait_for_work(self.targets[index])
                self.targets[index].kill()
                self.targets[index].log.unlink(missing_ok=True)  # what the next one says is its own
                self.targets[index] = self.run.target(index, slow=self.slow)
            else:
                self._kill_drafter()
            self.kills += 1

    def finish(self) -> None:
        assert self.drafter.wait(300) == 0, self.drafter.said()[-4000:]

    def _wait_for_work(self, target: JobProcess) -> None:
        """Until it has a drafter, whose requests a kill then leaves unanswered."""
        deadline = time.monotonic() + 60
        while self.drafter.running and "linked with" not in target.said():
            assert time.monotonic() < deadline, target.said()[-4000:]
            time.sleep(0.05)
        time.sleep(self.random.uniform(0.0, 0.5))

    def _kill_drafter(self) -> None:
        # Not before it got further than the one before: else nothing is ever committed.
        before, deadline = len(self.run.checkpoints()) and self.run.checkpoints()[-1], time.monotonic() + 60
        while self.drafter.running and (self.run.checkpoints() or [0])[-1] == before:
            assert time.monotonic() < deadline, self.drafter.said()[-4000:]
            time.sleep(0.1)
        if not self.drafter.running:
            return
        self.drafter.send(signal.SIGKILL)
        self.drafter.wait()
        self.attempt += 1
        (self.drafter,) = self.run.drafters(attempt=self.attempt)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_random_kills_change_nothing(s3_server: EmbeddedStore, store: Store, tmp_path: Path) -> None:
    disturb(s3_server, store, tmp_path, kills=20, epochs=6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_random_kills_change_nothing(
    s3_server: EmbeddedStore, store: Store, tmp_path: Path
) -> None:
    disturb(s3_server, store, tmp_path, kills=200, epochs=40)


def times_trained(passes: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    """How often each sample counts in each epoch: a step that was done again counts as it was done last."""
    last = {line["step"]: line["attempt"] for line in sorted(passes, key=lambda line: line["attempt"])}
    return Counter(
        (line["epoch"], sample)
        for line in passes
        if line["attempt"] == last[line["step"]]
        for sample in line["trained"]
    )


def disturb(server: EmbeddedStore, store: Store, folder: Path, *, kills: int, epochs: int) -> None:
    target = save_tiny_target(folder / "target", layers=5)
    common: dict[str, Any] = {
        "samples": SAMPLES,
        "target": target,
        "training": {"epochs": epochs, "checkpoint": {"everySteps": 1}, "queueDepth": 6},
    }
    with TrainingRun(server, store.under("undisturbed"), folder / "undisturbed", **common) as calm:
        calm.complete(targets=1)
        expected = calm.weights()
    trace = folder / "trace.jsonl"
    with TrainingRun(server, store.under("disturbed"), folder / "disturbed", trace=trace, **common) as run:
        disturber = Disturber(run, seed=1, slow=0.25)
        disturber.kill_until(kills)
        disturber.finish()
        counts = run.summary()["counts"]
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        asked = {what: sum(line.get(what, 0) for line in lines) for what in ("requested", "reissued")}
        passes = [line for line in lines if "trained" in line]
        print(
            f"{disturber.kills} kills, {disturber.attempt + 1} attempts: {asked['requested']} requested, "
            f"{asked['reissued']} re-issued, {sum(len(line['trained']) for line in passes)} passes of which "
            f"{counts['samples']:.0f} count, {SAMPLES * epochs} expected"
        )
        assert disturber.kills >= kills
        assert asked["reissued"] > 0
        assert times_trained(passes) == {
            (epoch, sample): 1
            for epoch in range(epochs)
            for sample in {s for line in passes for s in line["trained"]}
        }
        assert counts["samples"] == SAMPLES * epochs
        assert counts["lost_samples"] == 0
        for name, tensor in run.weights().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=5e-5)
