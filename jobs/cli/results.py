"""The table at the end of a run, and of `dflash status` when everything is done."""

from pathlib import Path
from typing import Any

import orjson
import typer
from rich.console import Console
from rich.table import Table


def print_results(report: Path, export: Path | None, *, promoted: bool) -> None:
    """Print what was measured; the last line is the path of report.json and nothing else."""
    figures: dict[str, Any] = orjson.loads(report.read_bytes())
    table = Table(title=f"{figures.get('name', 'drafter')}", show_header=False, title_justify="left")
    for name, value in rows(figures, promoted=promoted):
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
    if export is not None:
        typer.echo(f"drafter: {export}")
    page = report.with_suffix(".html")
    if page.exists():
        typer.echo(f"page:    {page}")
    typer.echo(str(report))


def rows(figures: dict[str, Any], *, promoted: bool) -> list[tuple[str, str]]:
    """Lines of the table, from a report's documented keys."""
    length = figures["acceptance_length"]
    lines = [
        ("acceptance length, pooled", f"{length['pooled']:.3f} tokens a verification, bonus included"),
        ("acceptance length, mean over answers", f"{length['per_response_mean']:.3f}"),
        ("speed-up over plain decoding", f"{figures['speedup']:.2f}x"),
    ]
    lines += [
        (f"tokens per second, {contender}", f"{rate:.1f}")
        for contender, rate in (figures.get("tokens_per_second") or {}).items()
    ]
    if figures.get("by_slot"):
        lines.append(("accepted, by slot", " ".join(f"{share:.2f}" for share in figures["by_slot"])))
    lines.append(("greedy outputs equal plain decoding's", _equal(figures)))
    if figures.get("questions"):
        lines.append(("prompts asked", str(figures["questions"])))
    gate = figures.get("gate") or {}
    if gate:
        lines.append(("gate", f"{'passed' if gate['passed'] else 'failed'}: {gate['reason']}"))
        if gate.get("advice"):
            lines.append(("advice", gate["advice"]))
    lines.append(("promoted", "yes" if promoted else "no"))
    return lines


def _equal(figures: dict[str, Any]) -> str:
    equal = figures.get("greedy_equal")
    if equal is None:
        return "not compared (temperature above 0)"
    ties = (figures.get("differences") or {}).get("near_ties")
    return ("yes" if equal else "NO") + (f", apart from {ties} near-ties" if ties else "")
