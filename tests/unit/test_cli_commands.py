"""The command line: exit codes, sentences, and a start without anything heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.unit.test_resource_load import GOOD


def dflash(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


def test_nothing_heavy_is_imported_at_start():
    code = (
        "import sys, jobs.cli, jobs.cli.run, jobs.cli.status, jobs.cli.validate;"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy', 'matplotlib', 'wandb'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_schema_is_json_in_the_files_spelling():
    schema = orjson.loads(dflash("schema").stdout)
    assert "blockSize" in schema["$defs"]["DraftModel"]["properties"]


def test_a_valid_file_is_told_valid(tmp_path):
    (tmp_path / "drafter.yaml").write_text(GOOD)
    done = dflash("validate", "--static", str(tmp_path / "drafter.yaml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid" in done.stdout


@pytest.mark.parametrize("command", ["run", "validate", "status"])
def test_a_wrong_field_ends_every_command_with_78_and_one_sentence(tmp_path, command):
    file = tmp_path / "drafter.yaml"
    file.write_text(GOOD + "  drafter: {blockSze: 8}\n")
    done = dflash(command, str(file))
    assert done.returncode == 78
    assert "did you mean blockSize?" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter.yaml"]


def with_storage(folder: Path, **storage) -> str:
    document = {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": "x"},
        "spec": {"target": {"model": "org/m"}, "prompts": {"uri": "p.jsonl"}, "storage": storage},
    }
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n')
    file = folder / "drafter.yaml"
    file.write_text(json.dumps(document))
    return str(file)


def test_a_model_folder_that_is_not_there_ends_a_run_before_the_storage_is_made(tmp_path):
    file = Path(with_storage(tmp_path, uri="state"))
    file.write_text(file.read_text().replace("org/m", "./m"))
    done = dflash("run", str(file))
    assert (done.returncode, "is not a folder" in done.stderr) == (78, True)
    assert not (tmp_path / "state").exists()


def test_the_status_of_a_drafter_that_was_never_run_makes_nothing(tmp_path):
    done = dflash("status", "--json", with_storage(tmp_path, uri="state"))
    state = orjson.loads(done.stdout)
    assert (state["phase"], [s["state"] for s in state["stages"]]) == ("not running", ["waiting"] * 3)
    assert not (tmp_path / "state").exists()


def test_prompts_in_s3_need_a_storage_in_s3(tmp_path):
    file = Path(with_storage(tmp_path, uri="state"))
    file.write_text(file.read_text().replace("p.jsonl", "s3://b/p.jsonl"))
    done = dflash("validate", str(file))
    assert (done.returncode, "give a local file of prompts" in done.stderr) == (78, True), done.stderr


KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}


def test_a_storage_that_does_not_answer_is_temporary(tmp_path):
    file = with_storage(tmp_path, uri="s3://bucket/x", endpoint="http://127.0.0.1:9")
    done = dflash("run", file, **KEYS)
    assert done.returncode == 75, done.stderr
    assert "127.0.0.1:9" in done.stderr


def test_a_storage_address_that_means_nothing(tmp_path):
    done = dflash("validate", "--static", with_storage(tmp_path, uri="gs://bucket/x"))
    assert (done.returncode, "write it like s3://bucket/prefix" in done.stderr) == (78, True)


def test_wrong_credentials_and_a_missing_bucket_are_configuration_errors(tmp_path, s3_server):
    endpoint = s3_server.location.endpoint
    done = dflash("run", with_storage(tmp_path, uri="s3://dflash/x", endpoint=endpoint), **KEYS)
    assert (done.returncode, "AWS_ACCESS_KEY_ID" in done.stderr) == (78, True), done.stderr
    file = with_storage(tmp_path, uri="s3://no-such-bucket/x", endpoint=endpoint)
    done = dflash("run", file, **s3_server.environment)
    assert (done.returncode, "bucket 'no-such-bucket' does not exist" in done.stderr) == (78, True), (
        done.stderr
    )


def test_a_full_disk_is_temporary(tmp_path):
    code = (
        "import sys, dflash.storage.embedded as e; from jobs.cli import main;"
        "e.free_bytes = lambda folder: 1 << 20; sys.argv = ['dflash', 'run', sys.argv[1]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, with_storage(tmp_path, uri="state")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75
    assert "disk full" in done.stderr
