"""`dflash plan` from a file and a config.json alone."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dflash.errors import ConfigurationError
from jobs.cli import app
from tests.support.planning import QWEN3_8B


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Drafter whose target is a folder with nothing but config.json."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(40)))
    path = tmp_path / "drafter.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "dflash.dev/v1alpha1",
                "kind": "Drafter",
                "metadata": {"name": "planned"},
                "spec": {
                    "target": {"model": "./model"},
                    "prompts": {"uri": "prompts.jsonl", "holdOut": 0.0},
                    "storage": {"uri": "state"},
                    "training": {"maxLength": 2048, "anchors": 256},
                },
            }
        )
    )
    return path


def plan(file: Path, *flags: str) -> dict:
    result = CliRunner().invoke(app, ["plan", str(file), "--json", *flags], catch_exceptions=False)
    return json.loads(result.stdout)


def refusal(file: Path, *flags: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        CliRunner().invoke(app, ["plan", str(file), *flags], catch_exceptions=False)
    return str(caught.value)


def test_a_plan_has_the_asked_count_among_its_rows_and_recommends_one_that_fits(file):
    found = plan(file, "--prompts", "500000", "--gpu", "h200:5", "--price", "3.2")
    rows = {row["gpus"]: row for row in found["rows"]}
    assert {4, 5, 6, 7, 8} <= rows.keys()
    assert rows[found["recommended"]]["fits"]
    for row in rows.values():
        assert row["targets"] + row["drafters"] == row["gpus"]
        assert row["cost"] == pytest.approx(3.2 * row["gpuHours"])
        assert row["costPerMillionTokens"] == pytest.approx(row["cost"] / found["trainedTokens"] * 1e6)


def test_every_estimate_names_the_assumption_that_moves_it_most(file):
    found = plan(file, "--prompts", "500000")
    for mover in found["movedMostBy"].values():
        assert mover["assumption"] in found["assumptions"]
        assert found["assumptions"][mover["assumption"]]["source"]


def test_prompts_are_counted_in_the_file_where_no_number_is_given(file):
    assert plan(file)["answers"] == 40


def test_measured_rates_replace_estimates_and_their_error_is_told(file, tmp_path):
    measured = tmp_path / "rates.json"
    measured.write_text('{"generation": 2000, "drafter": 4000}')
    found = plan(file, "--prompts", "1000", "--measured", str(measured))
    assert found["rates"]["generationTokensPerSecond"] == 2000
    assert found["estimateErrors"].keys() == {"generation", "drafter"}
    guessed = plan(file, "--prompts", "1000")["rates"]["generationTokensPerSecond"]
    assert found["estimateErrors"]["generation"] == pytest.approx(guessed / 2000 - 1)


def test_a_slow_network_limits_and_is_told(file):
    found = plan(file, "--prompts", "1000", "--gpu", "h200:8", "--network", "0.1")
    assert {row["limit"] for row in found["rows"]} & {"network"}
    assert any("network limits" in note for note in found["notes"])


def test_a_gpu_that_is_too_small_is_said_to_be(file, tmp_path):
    profile = tmp_path / "small.json"
    profile.write_text(
        json.dumps(
            {
                "name": "small",
                "bf16Flops": 1e13,
                "memoryBytes": 8e9,
                "memoryBandwidth": 3e11,
                "peerBandwidth": 1e10,
                "source": "a test",
            }
        )
    )
    found = plan(file, "--prompts", "1000", "--gpu", str(profile))
    assert found["recommended"] is None
    assert any("a generation pod needs" in note for note in found["notes"])


def test_the_table_is_complete_in_a_narrow_terminal(file):
    result = CliRunner().invoke(
        app, ["plan", str(file), "--prompts", "500000", "--gpu", "h200", "--price", "3"]
    )
    assert "recommended:" in result.stdout
    assert "per M tokens" in result.stdout
    assert "…" not in result.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "b300"], "--gpu b300: neither a known GPU"),
        (["--gpu", "b200:many"], "'many' is no number of GPUs"),
        (["--gpu", "b200:1"], "training needs a target and a drafter"),
        (["--config", "absent.json"], "--config absent.json: cannot be read"),
        (["--measured", "absent.json"], "--measured absent.json: cannot be used"),
    ],
)
def test_a_wrong_flag_is_told_in_a_sentence(file, flags, said):
    assert said in refusal(file, "--prompts", "1000", *flags)


def test_prompts_in_a_store_need_a_number(file):
    file.write_text(file.read_text().replace("uri: prompts.jsonl", "uri: s3://bucket/prompts.jsonl"))
    assert "give --prompts" in refusal(file)
