"""`dflash watch`: how a run goes, over time, on a terminal: stages, sparklines, verdict, alerts, cost.

Reads what `dflash status` reads, and the rows of metrics.jsonl; starts and changes nothing, so it can run
anywhere that the store can be reached from.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash import layout
from dflash.errors import ConfigurationError, TemporaryError
from dflash.progress import Progress
from dflash.resource.load import load_resource
from dflash.storage.location import is_local
from dflash.storage.store import Store
from dflash.tracking.jsonl import STEP, Row, read_rows
from jobs.cli.connect import connected, home_of
from jobs.cli.status import status_of
from jobs.cli.view import amount, figures, pace, remarks
from operators.observe import outputs_of

LOOK_SECONDS = 5.0
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48
_EVENTS = 5
_SERIES = (
    ("train/loss", "loss"),
    ("train/accuracy", "accuracy"),
    ("train/acceptance_length", "acceptance length, in training"),
    ("eval/acceptance_length", "acceptance length, measured"),
    ("drafter/tokens_per_second", "tokens per second"),
    ("drafter/wait_share", "drafters wait, share"),
    ("target/idle_share", "targets idle, share"),
    ("channel/depth", "queue depth"),
    ("train/gradient_norm", "gradient norm"),
    ("cost/spent", "spent"),
)


def watch_file(file: Path, *, once: bool) -> None:
    """Show until the Drafter is done, or Ctrl-C; `once` shows it one time."""
    drafter = load_resource(file)
    if is_local(drafter.spec.storage.uri) and not home_of(drafter, file).folder.exists():
        raise ConfigurationError(
            f"{drafter.metadata.name} was never run here; start it with: dflash run {file}"
        )
    console = Console()
    with connected(drafter, shared=True) as connection:
        resolved = connection.resolved(drafter)

        def look() -> tuple[Group, bool]:
            outputs = outputs_of(resolved, connection.store)
            state = status_of(resolved, outputs, connection.store)
            rows = rows_of(connection.store, outputs.hashes.drafter)
            return picture(state, rows), bool(state["report"])

        if once:
            console.print(look()[0])
            return
        with Live(console=console, refresh_per_second=1) as live:
            done = False
            while not done:
                try:
                    shown, done = look()
                    live.update(shown)
                except TemporaryError as error:
                    live.console.print(f"{time.strftime('%H:%M:%S')} {error}")
                except KeyboardInterrupt:
                    return
                try:
                    time.sleep(0.0 if done else LOOK_SECONDS)
                except KeyboardInterrupt:
                    return


def rows_of(store: Store, drafter: str) -> list[Row]:
    """Metrics as far as they were copied to the store: up to half a minute ago."""
    key = layout.drafter(drafter, "metrics.jsonl")
    return read_rows(store.get(key)) if store.exists(key) else []


def picture(state: Mapping[str, Any], rows: Sequence[Row]) -> Group:
    """All of it, from a status (`jobs.cli.status.status_of`) and rows of metrics."""
    lines: list[Text | Table] = [Text(f"{state['name']}: {state['phase']}", style="bold"), _stages(state)]
    running = next((s for s in state["stages"] if s["state"] == "running"), None)
    told = Progress.model_validate(running["progress"]) if running else None
    if any("event" not in row for row in rows):
        lines.append(_curves(rows))
    for sentence in remarks(told) if told is not None else []:
        alarming = sentence.startswith("alert:")
        lines.append(Text(sentence, style="red" if alarming else "", overflow="fold"))
    lines += [Text(sentence, overflow="fold") for sentence in state["costSentences"]]
    for row in [row for row in rows if "event" in row][-_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(row["time"]))
        lines.append(Text(f"{when} step {row[STEP]}: {row['event']}", style="dim", overflow="fold"))
    return Group(*lines)


def _stages(state: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 1))
    for stage in state["stages"]:
        seen = Progress.model_validate(stage["progress"]) if stage["progress"] else None
        share = 1.0 if stage["state"] == "done" else seen.done / seen.total if seen and seen.total else 0.0
        detail = ", ".join(filter(None, [amount(seen), pace(seen), figures(seen)])) if seen else ""
        bar = ProgressBar(total=1.0, completed=min(1.0, share), width=24)
        table.add_row(Text(stage["name"]), Text(stage["state"]), bar, Text(detail, overflow="fold"))
    return table


def _curves(rows: Sequence[Row]) -> Table:
    """A line for each series that there is: its course, and where it is now."""
    table = Table.grid(padding=(0, 1))
    for name, title in _SERIES:
        values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
        if values:
            table.add_row(Text(title), Text(sparkline(values)), Text(f"{values[-1]:.4g}"))
    return table


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """A curve of at most `width` blocks, each the mean of its share of the values; flat is low."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
