"""The guide from end to end on a tiny target, with the real jobs: warm-up, plan, run, and what shows them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from dflash.storage.embedded import EmbeddedStore
from tests.integration.test_local_real import SPEC
from tests.support import guide
from tests.support.tiny import save_tiny_target

pytestmark = pytest.mark.xdist_group("guide")


def declare(folder: Path, **sections) -> Path:
    spec = {
        **SPEC,
        "prompts": {"uri": "prompts.jsonl", "holdOut": 0.25, "limit": 40},
        "storage": {"uri": "store"},
        "tracking": {"gpuHourPrice": 2.0, "wandb": {"enabled": False}},
        **sections,
    }
    document = {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": "qwen3-8b"},
        "spec": spec,
    }
    file = folder / "drafter.yaml"
    file.write_text(json.dumps(document))
    return file


def dflash(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(guide.ROOT)},
        timeout=800,
        cwd=cwd,
        check=False,
    )


def make(folder: Path) -> Path:
    save_tiny_target(folder / "model")
    rows = (f'{{"prompt": "tell me of number {i}"}}\n' for i in range(2000))
    (folder / "prompts.jsonl").write_text("".join(rows))
    return folder


@dataclass
class Warmed:
    """A Drafter's folder, a plan from before its warm-up, and the warm-up."""

    folder: Path
    file: Path
    guessed: dict
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    folder = make(tmp_path_factory.mktemp("warmed"))
    file = declare(folder)
    guessed = orjson.loads(dflash("plan", str(file), "--json").stdout)
    (command,) = [words for words in guide.commands("dflash") if "--warm-up" in words]
    return Warmed(folder, file, guessed, dflash(*command, cwd=folder))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_warm_up_measures_the_chain_says_go_and_makes_plans_exact(warmed):
    done, file = warmed.done, warmed.file
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "fits: every stage ran to its end on CPU" in said
    assert "bottleneck: " in said
    assert "the whole run: " in said
    assert "GPU-hours, cost " in said
    assert said.splitlines()[-1] == "go"

    with EmbeddedStore(warmed.folder / "store") as server:
        keys = [info.key for info in server.store().list()]
        measured = server.store().get_json("warm-ups/qwen3-8b.json")
    assert keys == ["warm-ups/qwen3-8b.json"], "the real run's data is untouched"
    assert set(measured["stages"]) == {"generation", "training", "evaluation"}

    plan = orjson.loads(dflash("plan", str(file), "--json").stdout)
    assert plan["rates"]["generationTokensPerSecond"] == pytest.approx(measured["generation"])
    assert plan["assumptions"]["response_tokens"]["source"] == "warm-up"
    error = plan["estimateErrors"]["generation"]
    assert error > 0, "a CPU is slower than the GPU that was guessed"
    assert (1 + error) * measured["generation"] == pytest.approx(
        warmed.guessed["rates"]["generationTokensPerSecond"], rel=0.9
    )  # of other lengths
    assert "the first estimate of the drafter rate was" in dflash("plan", str(file)).stdout

    other = declare(warmed.folder, training={**SPEC["training"], "batchSize": 8})
    stale = dflash("plan", str(other), "--json")
    assert "measured with other settings" in stale.stderr
    assert "estimateErrors" not in orjson.loads(stale.stdout)
    declare(warmed.folder)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_command_of_the_guide_works_in_its_order(warmed):
    assert warmed.done.returncode == 0
    for words in guide.commands("dflash"):
        if "--warm-up" in words:
            continue  # done above
        if any(word.startswith("charts/") for word in words):
            guide.run_plan(words)
            continue
        done = dflash(*words, cwd=warmed.folder)
        assert done.returncode == 0, f"dflash {' '.join(words)}:\n{done.stdout}{done.stderr}"
        if words[0] == "status":
            assert "spent " in done.stdout
            assert "(cost " in done.stdout


def test_a_stage_that_fails_is_no_go_with_its_cause_and_code(tmp_path):
    folder = make(tmp_path)
    (folder / "model" / "model.safetensors").write_bytes(b"no weights")
    done = dflash("run", str(declare(folder)), "--warm-up", "5s", "--plain")
    assert done.returncode not in (0, None)
    assert "no-go: generation failed: " in done.stdout or done.returncode == 78, done.stdout + done.stderr
    assert not (folder / "store" / "run" / "qwen3-8b" / "warm-up.json").exists()


def test_a_time_that_is_none_is_told(tmp_path):
    done = dflash("run", str(declare(tmp_path)), "--warm-up", "soon")
    assert done.returncode == 78
    assert "--warm-up soon: give a time, as 5m" in done.stderr
