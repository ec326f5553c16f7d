"""`dflash run` with the real jobs on a tiny random target: generation, training, evaluation, and again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from dflash.resource.load import load_resource
from dflash.storage.embedded import EmbeddedStore
from operators.observe import outputs_of
from tests.support.tiny import save_tiny_target

SPEC = {
    "target": {"model": "./model", "dtype": "float32"},
    "prompts": {"uri": "prompts.jsonl", "holdOut": 0.25},
    "generation": {
        "engine": "transformers",
        "thinking": False,
        "maxTokens": 32,
        "sampling": {"temperature": 0.0},
        "gate": {
            "truncated": "keep",
            "minSupervisedTokens": 4,
            "maxDroppedShare": 1.0,
            "maxRepetitionShare": 1.0,
        },
    },
    "drafter": {"layers": 1, "blockSize": 4, "slidingWindow": 0, "taps": [0, 2]},
    "training": {
        "epochs": 3,
        "batchSize": 4,
        "anchors": 8,
        "dtype": "float32",
        "checkpoint": {"everySteps": 4},
    },
    "evaluation": {"engine": "transformers", "maxTokens": 12, "samples": 3, "dtype": "float32"},
    "storage": {"uri": "state"},
    "tracking": {"wandb": {"enabled": False}},
}


def declare(folder: Path, **sections) -> Path:
    document = {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": "tiny"},
        "spec": {**SPEC, **sections},
    }
    file = folder / "drafter.yaml"
    file.write_text(json.dumps(document))
    return file


def start(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "run", "--plain", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def finish(file: Path) -> tuple[str, str]:
    process = start(file)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_drafter_is_made_killed_resumed_measured_and_then_up_to_date(tmp_path):
    save_tiny_target(tmp_path / "model")
    rows = (f'{{"prompt": "tell me of number {i}"}}\n' for i in range(24))
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    file = declare(tmp_path)

    process = start(file)
    assert process.stderr is not None
    for line in process.stderr:
        if "training " in line:
            break
    time.sleep(2.0)
    process.kill()
    process.communicate()

    out, err = finish(file)
    assert "generating" not in err, "the dataset was committed and is made again"
    report = orjson.loads(Path(out.strip().splitlines()[-1]).read_bytes())
    assert report["greedy_equal"] is True
    assert report["acceptance_length"]["pooled"] >= 1.0
    assert (tmp_path / "state" / "drafters" / "tiny" / "model.safetensors").exists()

    out, err = finish(file)
    assert out.splitlines()[0] == "up to date"

    before = outputs_of(load_resource(file)).hashes
    after = outputs_of(
        load_resource(declare(tmp_path, evaluation={**SPEC["evaluation"], "samples": 2}))
    ).hashes
    assert (before.dataset, before.drafter) == (after.dataset, after.drafter)
    out, err = finish(file)
    assert "training" not in err
    assert orjson.loads(Path(out.strip().splitlines()[-1]).read_bytes())["evaluation"] == after.evaluation
    with EmbeddedStore(tmp_path / "state") as server:
        promoted = server.store().get_json("promoted/tiny.json")
    assert promoted["evaluation"] == after.evaluation
