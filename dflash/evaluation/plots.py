"""The report's plots, as PNG files: from a report's figures, nothing measured here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from dflash.evaluation.answers import NONE
from dflash.evaluation.report import Report, TrainingSummary

_INK, _MUTED = "#1b1f24", "#6b7280"
_COLOURS = ("#3558d4", "#d9822b", "#2f9e6e", "#9c4dcc")
_CURVES = ("train/loss", "train/accuracy", "train/streak", "eval/acceptance_length")


def draw(report: Report) -> dict[str, bytes]:
    """All plots that the report has figures for, by file name."""
    plots: dict[str, Callable[[Report], bytes | None]] = {
        "training.png": _training,
        "acceptance_by_slot.png": _by_slot,
        "tokens_per_second.png": _rates,
        "speedup_by_concurrency.png": _speedups,
        "acceptance_by_slice.png": _slices,
    }
    drawn = {name: plot(report) for name, plot in plots.items()}
    return {name: png for name, png in drawn.items() if png is not None}


@contextmanager
def _figure(columns: int = 1, width: float = 6.4) -> Iterator[tuple[Any, list[Any], BytesIO]]:
    """Axes side by side, and where the PNG will be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(_MUTED)
        axis.tick_params(colors=_MUTED, labelsize=9)
        axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    png = BytesIO()
    yield figure, list(axes), png
    figure.savefig(png, format="png", dpi=144)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=_INK)
    axis.set_xlabel(x, fontsize=9, color=_MUTED)
    axis.set_ylabel(y, fontsize=9, color=_MUTED)


def _curves_of(training: TrainingSummary) -> list[str]:
    """The metrics drawn: the known ones, else the first of those there are."""
    names = sorted(name for name in training.final if name != "global_step")
    return [name for name in _CURVES if name in names] or names[:3]


def _training(report: Report) -> bytes | None:
    if report.training is None or not (names := _curves_of(report.training)):
        return None
    with _figure(len(names), width=3.4 * len(names)) as (_, axes, png):
        for axis, name in zip(axes, names, strict=True):
            # Measured acceptance is told by tokens trained, to be compared between runs of unlike batches.
            along = "eval/tokens" if name.startswith("eval/") else "global_step"
            points = [(row[along], row[name]) for row in report.training.curve if name in row]
            axis.plot(*zip(*points, strict=True), color=_COLOURS[0], linewidth=1.6)
            _label(axis, name, "tokens trained" if along == "eval/tokens" else "step", "")
    return png.getvalue()


def _by_slot(report: Report) -> bytes | None:
    if not report.by_slot:
        return None
    with _figure() as (_, (axis,), png):
        slots = range(1, report.block_size)
        bars = axis.bar(slots, [100 * share for share in report.by_slot], color=_COLOURS[0], width=0.7)
        axis.bar_label(bars, fmt="%.0f", fontsize=8, color=_MUTED)
        axis.set_xticks(list(slots))
        _label(axis, "Drafts accepted, by slot of the block", "slot", "% of verifications")
    return png.getvalue()


def _rates(report: Report) -> bytes | None:
    first = report.contenders[0].concurrency
    rows = [m for m in report.contenders if m.concurrency == first]
    with _figure() as (_, (axis,), png):
        bars = axis.barh(
            [m.contender for m in rows],
            [m.tokens_per_second for m in rows],
            color=[_MUTED if m.contender == NONE else _COLOURS[0] for m in rows],
            height=0.6,
        )
        axis.bar_label(bars, fmt="%.1f", fontsize=9, color=_INK, padding=3)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        _label(axis, f"Decoding speed, {first} in flight", "tokens per second", "")
    return png.getvalue()


def _speedups(report: Report) -> bytes | None:
    concurrencies = sorted({m.concurrency for m in report.contenders})
    if len(concurrencies) < 2:
        return None
    with _figure() as (_, (axis,), png):
        names = [n for n in dict.fromkeys(m.contender for m in report.contenders) if n != NONE]
        for name, colour in zip(names, _COLOURS, strict=False):
            rows = [m for m in report.contenders if m.contender == name and m.speedup is not None]
            places = [concurrencies.index(m.concurrency) for m in rows]
            axis.plot(places, [m.speedup for m in rows], marker="o", color=colour, label=name)
            low = [m.speedup_interval.low for m in rows if m.speedup_interval]
            high = [m.speedup_interval.high for m in rows if m.speedup_interval]
            axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axhline(1.0, color=_MUTED, linewidth=1, linestyle="--")
        axis.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
        axis.legend(frameon=False, fontsize=9)
        _label(axis, "Speed-up over plain decoding", "requests in flight", "times")
    return png.getvalue()


def _slices(report: Report) -> bytes | None:
    rows = [
        (f"{kind}: {value}", part.length)
        for kind in (
            "prompt_set",
            "group",
            "language",
            "thinking",
            "tools",
            "prompt_length",
            "output_position",
        )
        for value, part in report.slices.get(kind, {}).items()
        if len(report.slices[kind]) > 1
    ][:24]
    if not rows:
        return None
    with _figure() as (figure, (axis,), png):
        figure.set_size_inches(6.4, 1.0 + 0.24 * len(rows))
        bars = axis.barh([n for n, _ in rows], [x.pooled for _, x in rows], color=_COLOURS[0], height=0.65)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, color=_MUTED, padding=3)
        axis.set_xlim(left=1.0)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        _label(axis, "Acceptance length, by kind of prompt", "tokens per verification", "")
    return png.getvalue()
