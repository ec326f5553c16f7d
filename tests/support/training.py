"""One training run of tiny models with real processes, the real channel and a real S3 server."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load
from torch import Tensor

from dflash import layout
from dflash.storage.commit import read_commit
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from dflash.tracking.jsonl import read_rows
from tests.support.datasets import commit_synthetic_dataset
from tests.support.processes import SLOW_CAPTURE, TRACE, JobProcess, free_port
from tests.support.tiny import save_tiny_target

DATASET = "d" * 16


class TrainingRun:
    """Starts targets and drafters of one run, and reads what they committed. All end with its context."""

    def __init__(
        self,
        server: EmbeddedStore,
        store: Store,
        folder: Path,
        *,
        samples: int = 24,
        run: str = "a" * 16,
        training: Mapping[str, Any] | None = None,
        drafter: Mapping[str, Any] | None = None,
        target: Path | None = None,
        interval: float = 0.5,
        held_out: int = 0,
        trace: Path | None = None,
    ) -> None:
        """`held_out` prompts, about, are there to measure by while training. `trace`: see TRACE."""
        self.store, self.run = store, run
        self._folder, self._environment = folder, dict(server.environment)
        if trace is not None:
            self._environment[TRACE] = str(trace)
        self._processes: list[JobProcess] = []
        folder.mkdir(parents=True, exist_ok=True)
        target = target or save_tiny_target(folder / "target", layers=5)
        if not store.exists(layout.dataset_manifest(DATASET)):
            commit_synthetic_dataset(store, DATASET, samples)
        prompts = folder / "prompts.jsonl"
        texts = (f"Question number {number}, please." for number in range(2 * held_out))
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        location = store.location
        resource = {
            "apiVersion": "dflash.dev/v1alpha1",
            "kind": "Drafter",
            "metadata": {"name": "tiny"},
            "spec": {
                "target": {"model": str(target), "dtype": "float32"},
                "prompts": {"uri": str(prompts), "holdOut": 0.5},
                "storage": {"uri": location.uri, "endpoint": location.endpoint, "region": location.region},
                "drafter": {
                    "layers": 1,
                    "blockSize": 4,
                    "taps": [1, 3],
                    "slidingWindow": 0,
                    **(drafter or {}),
                },
                "training": {
                    "epochs": 2,
                    "batchSize": 4,
                    "anchors": 8,
                    "maxLength": 64,
                    "learningRate": 0.003,
                    "microBatchTokens": 128,
                    "targetBatchTokens": 128,
                    "queueDepth": 8,
                    "dtype": "float32",
                    "backend": "gloo",
                    "targetWaitSeconds": 60,
                    "checkpoint": {"everySteps": 4},
                    **(training or {}),
                },
                "tracking": {"intervalSeconds": interval, "wandb": {"enabled": False}},
            },
        }
        self.resource_file = folder / "drafter.json"
        self.resource_file.write_text(json.dumps(resource))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def target(self, index: int = 0, slow: float | None = None) -> JobProcess:
        """Start a target, one that takes `slow` seconds longer for each batch."""
        environment = {} if slow is None else {SLOW_CAPTURE: str(slow)}
        return self._start("target", f"target-{index}", [f"--index={index}"], environment)

    def drafters(self, world: int = 1, attempt: int = 0) -> list[JobProcess]:
        """Start a group."""
        rendezvous = f"127.0.0.1:{free_port()}"
        return [
            self._start(
                "drafter",
                f"drafter-{rank}-a{attempt}",
                [f"--attempt={attempt}", f"--rank={rank}", f"--world={world}", f"--rendezvous={rendezvous}"],
            )
            for rank in range(world)
        ]

    def complete(self, targets: int = 1, drafters: int = 1, seconds: float = 120.0) -> None:
        """Run to the end, undisturbed; every process must end with 0."""
        processes = [self.target(i) for i in range(targets)] + self.drafters(drafters)
        for process in reversed(processes):
            code = process.wait(seconds)
            assert code == 0, f"{process.name} ended with {code}:\n{process.said()[-6000:]}"

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Wait until the heartbeat is at a step, at least."""
        deadline = time.monotonic() + seconds
        while (self.heartbeat() or {}).get("done", 0) < step:
            if time.monotonic() > deadline:
                said = "\n".join(p.said()[-2000:] for p in self._processes)
                raise AssertionError(f"not at step {step} after {seconds:.0f} s:\n{said}")
            time.sleep(0.1)

    def wait_for_checkpoint(self, seconds: float = 60.0) -> None:
        """Wait until a checkpoint is committed."""
        deadline = time.monotonic() + seconds
        while not self.checkpoints():
            if time.monotonic() > deadline:
                raise AssertionError(f"no checkpoint after {seconds:.0f} s")
            time.sleep(0.1)

    def heartbeat(self) -> dict[str, Any] | None:
        """The stage's progress."""
        return self.store.find_json(layout.heartbeat(self.run))

    def checkpoints(self) -> list[str]:
        """Committed checkpoints, by folder name."""
        prefix = layout.drafter(self.run, "checkpoints/")
        keys = (info.key for info in self.store.list(prefix))
        return [key.split("/")[-2] for key in keys if key.endswith(layout.COMMIT)]

    def weights(self) -> dict[str, Tensor]:
        """fp32 masters of the last checkpoint."""
        folder = self.checkpoints()[-1]
        return load(self.store.get(layout.drafter(self.run, f"checkpoints/{folder}/weights.safetensors")))

    def losses(self) -> dict[int, float]:
        """Loss by step, as far as metrics.jsonl has rows; every step has one when `interval` is tiny."""
        rows = read_rows(self.store.get(layout.drafter(self.run, "metrics.jsonl")))
        return {row["global_step"]: row["train/loss"] for row in rows if "train/loss" in row}

    def summary(self) -> dict[str, Any]:
        """What the export says of the training."""
        commit = read_commit(self.store, layout.export(self.run))
        assert commit is not None, "the run is not exported"
        return dict(commit.extra)

    def _start(
        self, job: str, name: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> JobProcess:
        common = [f"--resource={self.resource_file}", f"--dataset={DATASET}", f"--run={self.run}"]
        environment = {**self._environment, "OMP_NUM_THREADS": "1", **(environment or {})}
        process = JobProcess(job, [*common, *arguments], environment, self._folder / f"{name}.log")
        self._processes.append(process)
        return process
