"""What `dflash run` shows while it works: a live table on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash.planning.spending import Projection
from dflash.progress import Progress
from operators.accounts import visible_gpus
from operators.local import Snapshot
from operators.observed import STAGE_OF, STAGES, Stage

LINE_SECONDS = 10.0
_FIGURES = (
    "loss",
    "accuracy",
    "acceptance_length",
    "measured_acceptance_length",
    "best_acceptance_length",
    "streak",
    "tokens_per_second",
    "dropped_share",
)
_ACTIVE = ("Pending", "Queued", "Generating", "Training", "Evaluating")

Show = Callable[[Snapshot], None]


@contextmanager
def view(name: str, *, plain: bool) -> Iterator[Show]:
    """A function to show snapshots with, for as long as the context is open."""
    console = Console(stderr=True)
    if plain or not console.is_terminal:
        yield Lines().show
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def show(snapshot: Snapshot) -> None:
            live.update(render(name, snapshot))

        yield show


class Lines:
    """The plain view: a line when something changes, and every ten seconds while work goes on."""

    def __init__(self) -> None:
        self._told = ""
        self._failure: object = None
        self._at = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Print what is new."""
        failure = snapshot.summary.failure
        if failure is not None and failure != self._failure:
            self._failure = failure
            where = f"{failure.role} {failure.index}"
            self._print(f"{where}: {failure.reason}: {failure.message}")
        headline = f"{snapshot.summary.phase} {snapshot.trouble and 'storage cannot be reached'}".strip()
        now = time.monotonic()
        if headline == self._told and now - self._at < LINE_SECONDS:
            return
        self._told, self._at = headline, now
        self._print(" ".join([headline.lower(), describe(snapshot)]).strip())

    def _print(self, text: str) -> None:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stderr.flush()


def describe(snapshot: Snapshot) -> str:
    """One line on the stage at work."""
    if snapshot.trouble:
        return snapshot.trouble
    progress = snapshot.progress.get(snapshot.stage) if snapshot.stage else None
    if progress is None or snapshot.summary.phase not in _ACTIVE:
        return snapshot.summary.message
    parts = [amount(progress), pace(progress), figures(progress), progress.message]
    parts += _told_cost(snapshot.projection)
    return ", ".join(part for part in parts if part)


def render(name: str, snapshot: Snapshot) -> Group:
    """The live table."""
    table = Table.grid(padding=(0, 1))
    for stage in STAGES:
        table.add_row(*_row(snapshot, stage))
    lines: list[Text | Table] = [Text(f"{name}: {snapshot.summary.phase.lower()}", style="bold"), table]
    message = snapshot.trouble or snapshot.summary.message
    if message:
        lines.append(Text(message, style="yellow" if snapshot.trouble else "dim", overflow="fold"))
    at_work = snapshot.progress.get(snapshot.stage) if snapshot.stage else None
    if at_work is not None:
        said = [*remarks(at_work), *_told_cost(snapshot.projection)]
        lines += [Text(sentence, style="dim", overflow="fold") for sentence in said]
    failure = snapshot.summary.failure
    if failure is not None:
        what = f"last failure: {failure.role} {failure.index} {failure.reason}: {failure.message}"
        lines.append(Text(what, style="red", overflow="fold"))
    lines.append(Text(f"logs: {snapshot.logs}", style="dim", overflow="fold"))
    return Group(*lines)


def _row(snapshot: Snapshot, stage: Stage) -> tuple[Text | ProgressBar, ...]:
    done = snapshot.committed.has(stage)
    progress = snapshot.progress.get(stage)
    current = stage == snapshot.stage
    if done:
        mark = Text("done", style="green")
    elif current and snapshot.summary.phase == "Stalled":
        mark = Text("failed", style="red")
    elif current:
        mark = Text("now", style="cyan")
    else:
        mark = Text("-", style="dim")
    total = progress.total if progress else 0.0
    share = 1.0 if done else (progress.done / total if progress and total else 0.0)
    bar = ProgressBar(total=1.0, completed=min(share, 1.0), width=24)
    if progress is None or (done and not any(STAGE_OF[c.role] == stage for c in snapshot.children)):
        return mark, Text(stage), bar, Text(""), Text("")
    return (
        mark,
        Text(stage),
        bar,
        Text(amount(progress)),
        Text(", ".join(filter(None, [pace(progress), figures(progress)]))),
    )


def amount(progress: Progress) -> str:
    """Done and total in the stage's unit."""
    if not progress.total:
        return f"{progress.done:g} {progress.unit}".strip()
    share = 100 * progress.done / progress.total
    return f"{progress.done:g}/{progress.total:g} {progress.unit} ({share:.0f} %)"


def pace(progress: Progress) -> str:
    """Rate and time left."""
    parts = [f"{progress.rate:.3g} {progress.unit}/s"] if progress.rate else []
    if progress.eta_seconds is not None and progress.done < progress.total:
        parts.append(f"{clock(progress.eta_seconds)} left")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def figures(progress: Progress) -> str:
    """The figures that matter, in a fixed order."""
    told = [name for name in _FIGURES if name in progress.figures]
    return ", ".join(f"{name.replace('_', ' ')} {_number(progress.figures[name])}" for name in told)


def remarks(progress: Progress) -> list[str]:
    """What a stage says of itself in sentences: the bottleneck, why it ends early, and what is wrong."""
    said = [progress.figures.get(name) for name in ("verdict", "early_stop")]
    return [str(sentence) for sentence in said if sentence] + [f"alert: {text}" for text in progress.alerts]


def cost(projection: Projection) -> list[str]:
    """What was spent, what failures wasted of it, and the end; nothing before anything was spent."""
    if not projection.spent_gpu_hours:
        return []
    spent = f"spent {_hours(projection.spent_gpu_hours, projection.spent)}"
    if projection.wasted_gpu_hours:
        spent += f", of which failures wasted {_hours(projection.wasted_gpu_hours, projection.wasted)}"
    if projection.gpu_hours is None or projection.ends_at is None:
        return [spent]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(projection.ends_at))
    end = f"{projection.through} ends about {when}, at {_hours(projection.gpu_hours, projection.cost)}"
    return [spent, end]


def _told_cost(projection: Projection) -> list[str]:
    """The same while it runs here; on a machine without a GPU and without a price it would say nothing."""
    return cost(projection) if visible_gpus() or projection.price is not None else []


def _hours(gpu_hours: float, money: float | None) -> str:
    return f"{gpu_hours:.3g} GPU-hours" + ("" if money is None else f" (cost {money:,.2f})")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
