"""Timing and memory for benchmarks: interleaved repeats, medians, and memory in a process of its own."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of this process's CPU time of each function, taken in turns after one warm-up.

    CPU time, not the clock: with one thread it is the same on a quiet machine, and steadier on a busy one.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def resident_mib(field: str = "VmRSS") -> float:
    """A memory figure of this process from /proc, in MiB; VmHWM is the peak."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    """Make VmHWM start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def in_a_process(module: str, *arguments: str) -> dict[str, float]:
    """Run `python -m module arguments` and read the JSON object on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
