"""Runs one benchmark, or lists them all with their recorded figures.

    python -m tests.bench.run              the list
    python -m tests.bench.run NAME         run it; the last line is one JSON object
    python -m tests.bench.run NAME --record    also write its figures into RESULTS.md

A benchmark is a module `bench_<name>.py` with `run(quick) -> {figure: number}`. Figures are ratios
of two things measured in one run, interleaved, so that a noisy machine bears on both alike.
"""

import argparse
import datetime
import importlib
import json
import platform
import re
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
_ROW = "| {name} | {figure} | {value} | {date} | {machine} |"
_TABLE = re.compile(r"^\| (?P<name>\w+) \| (?P<figure>\w+) \| (?P<value>[^|]+) \| (?P<date>[^|]+) \|", re.M)


def names() -> list[str]:
    """All benchmarks, by name."""
    return sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))


def machine() -> str:
    """The processor, as its figures depend on it."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model.group(1) if model else platform.processor() or platform.machine()


def show_list() -> None:
    """One line a benchmark: what it compares, and its latest recorded figures."""
    recorded: dict[str, list[str]] = {}
    for row in _TABLE.finditer(RESULTS.read_text()):
        recorded.setdefault(row["name"], []).append(f"{row['figure']} {row['value'].strip()}")
    for name in names():
        module = importlib.import_module(f"tests.bench.bench_{name}")
        summary = (module.__doc__ or "").strip().splitlines()[0]
        print(f"{name:20} {summary}")
        print(f"{'':20} {', '.join(recorded.get(name, ['not recorded']))}")


def record(name: str, figures: dict[str, float]) -> None:
    """Replace the benchmark's rows in RESULTS.md's first table."""
    lines = RESULTS.read_text().splitlines()
    lines = [line for line in lines if not line.startswith(f"| {name} |")]
    end = lines.index("|---|---|---|---|---|") + 1
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    date = datetime.date.today().isoformat()
    lines[end:end] = [
        _ROW.format(name=name, figure=figure, value=f"{value:.4g}", date=date, machine=machine())
        for figure, value in figures.items()
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Parse the command line and do as it says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=names())
    parser.add_argument("--record", action="store_true", help="write the figures into RESULTS.md")
    parser.add_argument("--full", action="store_true", help="longer and steadier")
    arguments = parser.parse_args()
    if arguments.name is None:
        show_list()
        return
    module = importlib.import_module(f"tests.bench.bench_{arguments.name}")
    print((module.__doc__ or "").strip())
    figures = module.run(quick=not arguments.full)
    if arguments.record:
        record(arguments.name, figures)
    print(json.dumps({"name": arguments.name, "figures": figures}))


if __name__ == "__main__":
    main()
