"""The figure of a table's training curves: loss and metric."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce.report import lines as lines_lib
from lamb_tpu.reproduce.results import Record
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.tables import Metric

_HEIGHT = 2.2  # inches of axes including labels
_FAR = 10  # curves are cut at this multiple of the median of their first values

Curve = list[tuple[float, float]]


class _Line(NamedTuple):
    """A line in a panel: its optimizer, and the two curves, loss and metric, of each run."""

    optimizer: str
    runs: list[tuple[Curve, Curve]]


def quantities(measured: Sequence[Summary], metric: Metric) -> list[int]:
    """Returns which of the two curves to show: 0 for the loss, 1 for the metric.

    Omits a curve if every run has recorded at most one value.
    """
    runs = [_curves(record, metric) for summary in measured for record in summary.records]
    return [at for at in (0, 1) if any(len(run[at]) > 1 for run in runs)]


def draw(measured: Sequence[Summary], metric: Metric) -> Figure:
    """Plots training loss by update and metric by epoch, with a line for each run.

    Cells with the same column, such as a batch size, share axes; each column has separate axes. Lines that
    would look alike are split among several axes.
    """
    shown = quantities(measured, metric)
    split, labels = _panels(measured, metric, shown)
    # Include lines without a curve, so that each line has the same style as in the figure of batches.
    optimizers = {_name(summary, measured): summary.records[0]["optimizer"] for summary in measured}
    is_shared = len(optimizers) <= style.MOST  # one legend for all panels is enough
    legends = [[labels[name] for name in lines] for lines in split.values()]
    heights = [_HEIGHT] * len(split)
    if is_shared:
        heights, legends = [*heights, 0.05], [[] for _ in split] + [list(labels.values())]
    figure, panels = style.stacked(heights, legends)
    rows = []
    for panel, (title, lines) in zip(panels, split.items()):
        looks = lines_lib.looks(
            optimizers if is_shared else {name: line.optimizer for name, line in lines.items()}
        )
        if title:
            panel.suptitle(title, fontsize=11)
        rows.append(panel.subplots(1, len(shown), squeeze=False)[0])
        for axes, at in zip(rows[-1], shown, strict=True):
            for name, line in lines.items():
                _draw_line(
                    axes,
                    [run[at] for run in line.runs],
                    looks[name],
                    labels[name],
                    list(looks).index(name),
                )
            style.dress(
                axes,
                "",
                ("completed updates", "epochs")[at],
                ("training loss", metric.label)[at],
                height=_HEIGHT - 0.9,
            )
        if not is_shared:
            style.legend_below(panel)
    for column, at in enumerate(shown):
        _scale([row[column] for row in rows], at == 0 or metric.better == "lower")
    if is_shared:
        style.legend_below(panels[-1], [axes for row in rows for axes in row])
    return figure


def _has_columns(measured: Sequence[Summary]) -> bool:
    return len({summary.cell.column for summary in measured}) > 1


def _name(summary: Summary, measured: Sequence[Summary]) -> str:
    """Returns the name of a cell's line, which all cells of its row share."""
    return (summary.cell.row if _has_columns(measured) else "") or summary.cell.name


def _title(summary: Summary) -> str:
    """Returns the column of a cell, with the word 'batch' if it is the batch size."""
    column, batch = summary.cell.column, summary.records[0]["batch"]
    return f"batch {column}" if column == f"{batch:,}" else column


def _panels(
    measured: Sequence[Summary], metric: Metric, shown: Sequence[int]
) -> tuple[dict[str, dict[str, _Line]], dict[str, str]]:
    """Returns the lines that have a curve in `shown`, by panel, and the label of each line."""
    has_columns = _has_columns(measured)
    by_column: dict[str, dict[str, _Line]] = {}
    has_curve: dict[str, list[bool]] = {}
    for summary in measured:
        name = _name(summary, measured)
        lines = by_column.setdefault(_title(summary) if has_columns else "", {})
        line = lines.setdefault(name, _Line(summary.records[0]["optimizer"], []))
        for record in summary.records:
            run = _curves(record, metric)
            has_curve.setdefault(name, []).append(any(run[at] for at in shown))
            line.runs.append(run)
    split = {}
    for column, lines in by_column.items():
        drawn = {
            name: line
            for name, line in lines.items()
            if any(run[at] for run in line.runs for at in shown)
        }
        for title, group in lines_lib.panels(drawn).items():
            if group:
                split[", ".join(filter(None, [column, title]))] = group
    labels = {
        name: name if all(flags) else f"{name} ({sum(flags)} of {len(flags)} runs)"
        for name, flags in has_curve.items()
        if any(flags)
    }
    return split, labels


def _curves(record: Record, metric: Metric) -> tuple[Curve, Curve]:
    """Returns the recorded training loss by update and metric by epoch."""
    evaluations = [
        (epoch, metric.factor * value)
        for epoch, value in record["evaluations"]
        if value is not None
    ]
    return [(step, loss) for step, loss in record["losses"]], evaluations


def _draw_line(
    axes: Axes, runs: Iterable[Curve], look: Mapping[str, Any], label: str, number: int
) -> None:
    for points in filter(None, runs):
        axes.plot(
            *zip(*points), **style.sparse(look, len(points), number), linewidth=1.2, label=label
        )
        label = "_nolegend_"  # so that the legend has only the first run of a line


def _scale(panels: Sequence[Axes], may_be_log: bool) -> None:
    """Gives the panels of one quantity the same y axis, and the same x axis if runs are of similar length."""
    lines = [line for axes in panels for line in axes.lines]
    if not lines:
        return
    ends = [
        max(float(np.max(line.get_xdata())) for line in axes.lines) for axes in panels if axes.lines
    ]
    is_log = may_be_log and all(y > 0 for line in lines for y in style.heights(line))
    for axes in panels:
        if axes is not panels[0]:
            axes.sharey(panels[0])
            if max(ends) < 2 * min(ends):
                axes.sharex(panels[0])
        axes.locator_params("x", nbins=3)  # more tick labels would overlap in narrow axes
    panels[0].autoscale_view()
    if may_be_log:
        most = _FAR * statistics.median(style.heights(line)[0] for line in lines)
        for axes in panels:
            if is_log:
                style.log_axis(axes)
            style.cut_above(axes, most)
