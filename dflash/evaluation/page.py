"""report.html: the report for a reader. Self-contained: the plots are inside, nothing is fetched."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files

import yaml
from jinja2 import Environment, StrictUndefined

from dflash.evaluation.report import Report

_TITLES = {
    "training.png": "Training",
    "acceptance_by_slot.png": "Acceptance by slot",
    "tokens_per_second.png": "Tokens per second",
    "speedup_by_concurrency.png": "Speed-up by concurrency",
    "acceptance_by_slice.png": "Acceptance by kind of prompt",
}


def render(report: Report, plots: Mapping[str, bytes]) -> str:
    """The page; `plots` as `dflash.evaluation.plots.draw` gives them."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files("dflash.evaluation") / "page.html.j2").read_text("utf-8"))
    pictures = [
        (_TITLES[name], "data:image/png;base64," + base64.b64encode(png).decode())
        for name, png in plots.items()
    ]
    return template.render(
        report=report,
        pictures=pictures,
        created=datetime.fromtimestamp(report.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        configuration=yaml.safe_dump(report.configuration, sort_keys=False),
    )
