"""The dashboard shows metrics that the operator has, each panel in a place of its own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from operators.metrics import Figures, Metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "charts" / "files" / "dashboard.json").read_text())
STATUS: dict[str, Any] = {
    "phase": "Training",
    "stage": "training",
    "stages": [{"name": "training", "gpuSeconds": 12, "wastedGpuSeconds": 1}],
    "progress": {
        "done": 1,
        "total": 2,
        "figures": {
            "loss": "1",
            "accuracy": "1",
            "queue_depth": "1",
            "targets": "1",
            "target_idle_share": "0",
            "drafter_wait_share": "0",
            "tokens_per_second": "1",
            "acceptance_length": "1",
            "measured_acceptance_length": "1",
            "bottleneck": "targets",
        },
    },
    "acceptanceLength": "3.1",
    "cost": {
        "spent": "1.00",
        "wasted": "0.00",
        "projected": "2.00",
        "spentGpuHours": "1.00",
        "endsAt": "2026-12-01T00:00:00Z",
        "through": "training",
    },
}


@pytest.fixture(scope="module")
def scraped() -> str:
    metrics = Metrics()
    metrics.reconciles.labels("done").inc()
    figures = Figures(
        drafters=lambda: [{"metadata": {"name": "d"}, "status": STATUS}],
        queue_length=lambda: 0,
        requests=dict,
        actions=dict,
        status_writes=lambda: 0,
        watch_silence=lambda: {"pods": 1.0},
        relists=dict,
    )
    registry = CollectorRegistry()
    registry.register(figures)  # type: ignore[arg-type]
    return generate_latest(metrics.registry).decode() + generate_latest(registry).decode()


def test_every_panel_asks_for_metrics_that_there_are(scraped: str) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"dflash_\w+", target["expr"])
            assert names, panel["title"]
            for name in names:
                assert f"\n{name}" in scraped, f"{panel['title']}: there is no {name}"
            for figures in re.findall(r'name=~?"([^"]+)"', target["expr"]):
                for figure in figures.split("|"):
                    assert f'name="{figure}"' in scraped, f"{panel['title']}: there is no figure {figure}"


def test_panels_do_not_overlap_and_each_has_an_id() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
