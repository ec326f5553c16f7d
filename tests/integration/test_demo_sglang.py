"""`ENGINE=sglang make demo` through to its promotion, and the same drafter measured by our own decoder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.evaluation.report import Report
from jobs.demo import sglang_cpu
from tests.support.agreement import within_joint_interval, within_sampling_error

pytestmark = [
    pytest.mark.soak,
    pytest.mark.sglang,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not sglang_cpu.available(), reason="needs `make serve-env` and a C compiler"),
]


def finished(folder: Path, *arguments: str, **variables: str) -> Report:
    """The report that the command ends with."""
    environment = {**os.environ, "PYTHONPATH": str(sglang_cpu.ROOT), **variables}
    command = [sys.executable, "-m", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return Report.model_validate_json(Path(folder, ended.stdout.splitlines()[-1]).read_bytes())


def test_the_demos_drafter_is_accepted_by_sglang_as_by_our_decoder(tmp_path: Path) -> None:
    served = finished(tmp_path, "jobs.demo", ENGINE="sglang")
    declared = tmp_path / ".demo" / "drafter.yaml"
    before, evaluation, after = declared.read_text().partition("  evaluation:\n    engine: sglang\n")
    assert evaluation
    declared.write_text(f"{before}  evaluation:\n    engine: transformers\n{after}")
    ours = finished(tmp_path, "jobs.cli", "run", str(declared), HF_HUB_OFFLINE="1")

    assert served.drafter == ours.drafter, "evaluated again, not trained again"
    assert (served.engine["name"], ours.engine["name"]) == ("sglang", "transformers")
    for report in (served, ours):
        assert report.acceptance_length.tokens >= 1000
        assert report.greedy_equal is True, report.differences
        assert report.gate.passed, report.gate
    assert not [w for w in served.warnings if "counted" in w or "unstable" in w], served.warnings
    assert within_joint_interval(served.acceptance_length, ours.acceptance_length)
    assert within_sampling_error(served.histogram, ours.histogram), (served.histogram, ours.histogram)
