"""Pictures of a table's runs: against the batch, over training, trust ratios of the layers."""

import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce.results import Record
from lamb_tpu.reproduce.summary import Summary, half_width
from lamb_tpu.reproduce.tables import Metric, Scale, Table

_MARKERS = "os^Dv<>ph*X"


def all_of(table: Table, scale: Scale, found: Sequence[Summary]) -> dict[str, Figure]:
    """Returns the pictures of a table at a scale, by name; only those that have something to show.

    The pictures are 'batches', 'training' and 'ratios'.
    """
    measured = [summary for summary in found if summary.records]
    if not measured:
        return {}
    title = f"{table.title} ({scale.name})"
    pictures = {}
    if any(record["losses"] for summary in measured for record in summary.records):
        pictures["training"] = training(measured, scale.metric, title)
    if len({record["batch"] for summary in measured for record in summary.records}) > 1:
        pictures = {"batches": batches(measured, scale.metric, title)} | pictures
    for summary in measured:
        if summary.records[0]["ratios"] and "ratios" not in pictures:
            name = summary.cell.name
            pictures["ratios"] = ratios(summary.records[0], f"{title}: {name}")
    return pictures


def batches(measured: Sequence[Summary], metric: Metric, title: str) -> Figure:
    """Plots the metric against the batch, a line for each optimizer.

    A small point is a seed; a large one is the mean, with its 95 % interval (Student's t). A run
    that diverged has no point.
    """
    figure = style.figure(7.5, 4.6)
    axes = figure.subplots()
    lines: dict[str, dict[int, list[float]]] = {}
    for summary in measured:
        for record, value in zip(summary.records, summary.values):
            line = lines.setdefault(record["optimizer"], {})
            line.setdefault(record["batch"], []).extend([] if value is None else [value])
    for number, (optimizer, points) in enumerate(sorted(lines.items())):
        look = _look(optimizer, number)
        at = [batch for batch in sorted(points) if points[batch]]
        means = [statistics.fmean(points[batch]) for batch in at]
        widths = [half_width(points[batch]) or 0.0 for batch in at]
        name = style.OPTIMIZERS[optimizer].name if optimizer in style.OPTIMIZERS else optimizer
        axes.errorbar(at, means, widths, label=name, capsize=3, **look)
        for batch in at:
            axes.plot(
                [batch] * len(points[batch]), points[batch], linestyle="", alpha=0.4,
                markersize=3, color=look["color"], marker=look["marker"],
            )
    every = sorted({batch for points in lines.values() for batch in points})
    style.dress(axes, title, "batch size (examples)", metric.label, metric.better)
    style.batch_axis(axes, every)
    axes.legend(frameon=False, fontsize=8)
    return figure


def training(measured: Sequence[Summary], metric: Metric, title: str) -> Figure:
    """Plots the training loss over updates and the metric over epochs; a line for each seed."""
    figure = style.figure(10, 4.2)
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    several = len({summary.records[0]["optimizer"] for summary in measured}) < len(measured)
    for number, summary in enumerate(measured):
        # Cells of one optimizer would have one colour.
        look = _look("" if several else summary.records[0]["optimizer"], number)
        for seed, record in enumerate(summary.records):
            label = summary.cell.name if not seed else None
            _curve(left, record["losses"], look["color"], label)
            points = [
                [epoch, metric.factor * value] for epoch, value in record["evaluations"]
                if value is not None
            ]
            _curve(right, points, look["color"], None, marker=look["marker"])
    style.dress(left, "training loss", "completed updates", "loss", "lower")
    if all(v > 0 for s in measured for r in s.records for _, v in r["losses"]):
        left.set_yscale("log")
    style.dress(right, metric.label, "epochs", metric.label, metric.better)
    figure.legend(
        loc="outside lower center", ncols=min(len(measured), 6), frameon=False, fontsize=8
    )
    return figure


def ratios(record: Record, title: str) -> Figure:
    """Plots the trust ratio of each layer over training, dark to bright from first to last."""
    figure = style.figure(7.5, 4.2)
    axes = figure.subplots()
    layers = {
        name: [[step, value] for step, value in points if value]
        for name, points in record["ratios"].items()
    }
    colors = matplotlib.colormaps[style.SEQUENCE](np.linspace(0, 0.92, len(layers)))
    named = len(layers) <= 10
    for number, (name, points) in enumerate(layers.items()):
        shown = named or number in (0, len(layers) - 1)
        _curve(axes, points, colors[number], name if shown else None)
    style.dress(axes, title, "completed updates", "trust ratio")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=7)
    return figure


def _curve(
    axes: Axes, points: Sequence[Sequence[float]], color: object, label: str | None,
    marker: str = "",
) -> None:
    if points:
        x, y = zip(*points)
        axes.plot(x, y, color=color, label=label, marker=marker, markersize=3, linewidth=1.2)


def _look(optimizer: str, number: int) -> dict[str, Any]:
    """Returns the colour and marker of a line."""
    if optimizer in style.OPTIMIZERS:
        known = style.OPTIMIZERS[optimizer]
        return {"color": known.color, "marker": known.marker}
    return {
        "color": matplotlib.colors.to_hex(matplotlib.colormaps["tab10"](number % 10)),
        "marker": _MARKERS[number % len(_MARKERS)],
    }
