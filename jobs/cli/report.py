"""`dflash report`: read evaluation reports, and compare two of them."""

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from dflash.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_CONDITIONS = ("temperature", "max_tokens", "questions", "repeats", "block_size")
"""What must be equal for figures to be comparable, beside engine, dtype and target."""


@app.callback()
def _root() -> None:
    """Read evaluation reports."""


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A report.json, or the folder it lies in.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """Show two reports side by side, and say whether the difference is more than chance."""
    first, second = read(a), read(b)
    table = Table("", str(a), str(b), "difference")
    for name, left, right in rows(first, second):
        change = f"{right - left:+.3f}" if isinstance(left, float) and isinstance(right, float) else ""
        table.add_row(name, _shown(left), _shown(right), change)
    Console(soft_wrap=True).print(table)
    for sentence in conclusions(first, second):
        typer.echo(sentence)


def read(path: Path) -> dict[str, Any]:
    """A report.json; ConfigurationError when it is none."""
    path = path / "report.json" if path.is_dir() else path
    try:
        report = orjson.loads(path.read_bytes())
        report["acceptance_length"]["pooled"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: no evaluation report ({error}); give a report.json") from error
    return dict(report)


def rows(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value in a, value in b), by documented keys."""
    paths: list[tuple[str, tuple[str, ...]]] = [
        ("acceptance length, pooled", ("acceptance_length", "pooled")),
        ("acceptance length, mean over answers", ("acceptance_length", "per_response_mean")),
        ("speed-up over plain decoding", ("speedup",)),
    ]
    lines = [(name, _at(a, path), _at(b, path)) for name, path in paths]
    for contender in dict.fromkeys([*a["tokens_per_second"], *b["tokens_per_second"]]):
        left, right = (_at(report, ("tokens_per_second", contender)) for report in (a, b))
        lines.append((f"tokens per second, {contender}", left, right))
    lines += [
        (f"accepted at slot {slot + 1}", left, right)
        for slot, (left, right) in enumerate(zip(a["by_slot"], b["by_slot"], strict=False))
    ]
    for kind, parts in a["slices"].items():
        for value in parts:
            left, right = (_at(r, ("slices", kind, value, "length", "pooled")) for r in (a, b))
            if len(parts) > 1 and right is not None:
                lines.append((f"acceptance length, {kind} {value}", left, right))
    lines.append(("greedy outputs equal", a["greedy_equal"], b["greedy_equal"]))
    lines.append(("gate passed", a["gate"]["passed"], b["gate"]["passed"]))
    return lines


def conclusions(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Whether the figures may be compared at all, and whether acceptance differs by more than chance."""
    found = []
    unequal = [name for name in _CONDITIONS if a[name] != b[name]]
    unequal += [
        f"engine {name}" for name in ("name", "dtype", "device") if a["engine"][name] != b["engine"][name]
    ]
    unequal += ["target"] if a["target"]["fingerprint"] != b["target"]["fingerprint"] else []
    if unequal:
        found.append(f"Not measured alike: {', '.join(unequal)} differ; speeds and lengths do not compare.")
    left, right = (r["acceptance_length"]["pooled_interval"] for r in (a, b))
    if left and right:
        apart = left["high"] < right["low"] or right["high"] < left["low"]
        what = "differ by more than chance" if apart else "may be the same: their 95 % intervals overlap"
        found.append(f"The acceptance lengths {what}.")
    return found


def _at(report: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return {True: "yes", False: "no", None: "-"}.get(value, str(value))
