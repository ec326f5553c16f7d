"""`dflash run --warm-up` with the real jobs on a tiny target, and what `dflash plan` makes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from dflash.storage.embedded import EmbeddedStore
from tests.integration.test_local_real import SPEC
from tests.support.tiny import save_tiny_target


def declare(folder: Path, **sections) -> Path:
    spec = {**SPEC, "prompts": {"uri": "prompts.jsonl"}, "tracking": {"gpuHourPrice": 2.0}, **sections}
    document = {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": "tiny"},
        "spec": spec,
    }
    file = folder / "drafter.yaml"
    file.write_text(json.dumps(document))
    return file


def dflash(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=800,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_target(tmp_path / "model")
    rows = (f'{{"prompt": "tell me of number {i}"}}\n' for i in range(2000))
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_warm_up_measures_the_chain_says_go_and_makes_plans_exact(folder):
    file = declare(folder)
    before = orjson.loads(dflash("plan", str(file), "--json").stdout)
    done = dflash("run", str(file), "--warm-up", "5s", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "fits: every stage ran to its end on CPU" in said
    assert "bottleneck: " in said
    assert "the whole run: " in said
    assert "GPU-hours, cost " in said
    assert said.splitlines()[-1] == "go"

    with EmbeddedStore(folder / "state") as server:
        keys = [info.key for info in server.store().list()]
        measured = server.store().get_json("warm-ups/tiny.json")
    assert keys == ["warm-ups/tiny.json"], "the real run's data is untouched"
    assert set(measured["stages"]) == {"generation", "training", "evaluation"}

    plan = orjson.loads(dflash("plan", str(file), "--json").stdout)
    assert plan["rates"]["generationTokensPerSecond"] == pytest.approx(measured["generation"])
    assert plan["assumptions"]["response_tokens"]["source"] == "warm-up"
    guessed = before["rates"]["generationTokensPerSecond"]
    error = plan["estimateErrors"]["generation"]
    assert error > 0, "a CPU is slower than the GPU that was guessed"
    assert (1 + error) * measured["generation"] == pytest.approx(guessed, rel=0.5)  # of other lengths
    assert "the first estimate of the drafter rate was" in dflash("plan", str(file)).stdout

    other = declare(folder, training={**SPEC["training"], "batchSize": 8})
    stale = dflash("plan", str(other), "--json")
    assert "measured with other settings" in stale.stderr
    assert "estimateErrors" not in orjson.loads(stale.stdout)


def test_a_stage_that_fails_is_no_go_with_its_cause_and_code(folder):
    (folder / "model" / "model.safetensors").write_bytes(b"no weights")
    done = dflash("run", str(declare(folder)), "--warm-up", "5s", "--plain")
    assert done.returncode not in (0, None)
    assert done.stdout.startswith("no-go: generation failed: "), done.stdout + done.stderr
    assert not (folder / "state" / "run" / "tiny" / "warm-up.json").exists()


def test_a_time_that_is_none_is_told(folder):
    done = dflash("run", str(declare(folder)), "--warm-up", "soon")
    assert done.returncode == 78
    assert "--warm-up soon: give a time, as 5m" in done.stderr
