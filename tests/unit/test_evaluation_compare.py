"""`dflash report compare`: differences, and whether they mean anything."""

from pathlib import Path

import orjson
import pytest

from dflash.errors import ConfigurationError
from jobs.cli.report import conclusions, read, rows


def report(pooled: float, half: float = 0.1, **changes: object) -> dict:
    interval = {"low": pooled - half, "high": pooled + half}
    return {
        "acceptance_length": {
            "pooled": pooled,
            "per_response_mean": pooled + 0.1,
            "pooled_interval": interval,
        },
        "speedup": pooled / 2,
        "tokens_per_second": {"none": 30.0, "dflash": 15.0 * pooled},
        "by_slot": [0.4, 0.2],
        "slices": {"group": {"a": {"length": {"pooled": 1.0}}, "b": {"length": {"pooled": 2.0}}}},
        "greedy_equal": True,
        "gate": {"passed": True},
        "temperature": 0.0,
        "max_tokens": 64,
        "questions": 60,
        "repeats": 1,
        "block_size": 3,
        "engine": {"name": "transformers", "dtype": "float32", "device": "x CPU"},
        "target": {"fingerprint": "f"},
    } | changes


def test_figures_are_put_side_by_side() -> None:
    found = {name: (a, b) for name, a, b in rows(report(1.5), report(2.0))}
    assert found["acceptance length, pooled"] == (1.5, 2.0)
    assert found["tokens per second, dflash"] == (22.5, 30.0)
    assert found["acceptance length, group b"] == (2.0, 2.0)
    assert found["accepted at slot 2"] == (0.2, 0.2)


def test_a_difference_within_the_intervals_is_called_so() -> None:
    assert "may be the same" in conclusions(report(1.50), report(1.55))[0]
    assert "differ by more than chance" in conclusions(report(1.5), report(2.0))[0]


def test_reports_of_unlike_runs_are_not_compared_silently() -> None:
    told = conclusions(report(1.5), report(1.5, temperature=1.0, target={"fingerprint": "g"}))
    assert "Not measured alike: temperature, target differ" in told[0]


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no evaluation report"):
        read(tmp_path)
    (tmp_path / "report.json").write_bytes(orjson.dumps(report(1.5)))
    assert read(tmp_path)["questions"] == 60
