"""What `make demo` declares, for each engine, and what it hands over to."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from dflash.resource.load import load_resource
from jobs.demo import __main__ as demo
from jobs.demo import sglang_cpu


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_the_demo_declares_its_engine_with_what_that_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    started: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGINE", engine)
    monkeypatch.setenv("DFLASH_SGLANG_PYTHON", "")
    monkeypatch.setattr(demo, "prepare", lambda: tmp_path)
    monkeypatch.setattr(sglang_cpu, "available", lambda: True)
    monkeypatch.setattr(sglang_cpu, "_driver_stub", lambda: tmp_path / "stub")
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    demo.main()
    assert started[0][-2:] == ["run", ".demo/drafter.yaml"]
    spec = load_resource(tmp_path / ".demo" / "drafter.yaml").spec
    served = engine == "sglang"
    assert (spec.generation.engine, spec.evaluation.engine) == (engine, engine)
    assert spec.evaluation.dtype == ("bfloat16" if served else "float32")
    assert ("--device" in spec.generation.server_args) is served
    assert (os.environ["DFLASH_SGLANG_PYTHON"] != "") is served


def test_only_the_engines_own_python_has_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$1 $TRITON_INTERPRET $LD_LIBRARY_PATH"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sglang_cpu, "PYTHON", python)
    monkeypatch.setattr(sglang_cpu, "_driver_stub", lambda: "/the stub")
    monkeypatch.setattr(sglang_cpu, "available", lambda: True)
    script = sglang_cpu.write_interpreter(tmp_path / "script")
    said = subprocess.run([str(script), "-m"], capture_output=True, text=True, check=True).stdout
    assert said == "-m 1 /the stub\n"
    assert "TRITON_INTERPRET" not in os.environ
