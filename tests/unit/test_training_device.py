"""The device, and the shared memory that NCCL needs."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash.errors import ConfigurationError
from dflash.training.device import device_of, require_shared_memory


def _has(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    size = SimpleNamespace(f_blocks=mebibytes << 8, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _folder: size)


def test_the_shared_memory_of_a_container_without_a_volume_is_too_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _has(monkeypatch, 64)
    with pytest.raises(ConfigurationError, match=r"has 64 MiB and NCCL needs .* jobs.shmSize"):
        require_shared_memory(tmp_path)


def test_what_the_chart_gives_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _has(monkeypatch, 8192)
    require_shared_memory(tmp_path)
    require_shared_memory(tmp_path / "not-there")


def test_the_cpus_transport_asks_for_no_gpu_and_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, 0)
    assert device_of("gloo").type == "cpu"
