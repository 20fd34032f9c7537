"""The figure of a table's metric by batch size."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lamb_tpu import style
from lamb_tpu.reproduce.report import lines as lines_lib
from lamb_tpu.reproduce.summary import Summary, average_batch, half_width, shown
from lamb_tpu.reproduce.tables import Metric

_STEP = 0.08  # distance between lines at one batch, in octaves
_LEVEL = 16  # height of an annotation at the edge, in points
_FAR = 10  # if the largest value is more than this many times the smallest, the axis is logarithmic


class _Line(NamedTuple):
    """A line of the figure: its optimizer, and the values of its runs at each batch size."""

    optimizer: str
    points: dict[int, list[float | None]]

    def values(self, batch: int) -> list[float]:
        """Returns the values at a batch size, without diverged runs."""
        return [value for value in self.points[batch] if value is not None]


class _Edge(NamedTuple):
    """An annotation at the edge of the axes, for a point outside the axes."""

    position: float
    text: str
    color: str
    is_below: bool


def has_curve(measured: Sequence[Summary]) -> bool:
    """Returns whether the runs have several batch sizes and more than two values."""
    values = [value for summary in measured for value in summary.values if value is not None]
    sizes = {record["batch"] for summary in measured for record in summary.records}
    return len(sizes) > 1 and len(values) > 2


def draw(measured: Sequence[Summary], metric: Metric) -> Figure:
    """Plots the metric by batch size, with a line for each row of a matrix or else for each optimizer.

    Small points are seeds; large points are means with their 95 % intervals (Student's t). If two cells
    of a line have the same batch size in their config, there are no lines: each cell is a point at the
    average batch size of its runs. Lines that would look alike are split among several axes.
    """
    separate = _share_a_point(measured)
    lines: dict[str, _Line] = {}
    for summary in measured:
        # Average over the seeds: if gradients set the batch size, it differs between seeds.
        average = round(statistics.fmean(map(average_batch, summary.records))) if separate else None
        name = summary.cell.name if separate else _line_of(summary)
        line = lines.setdefault(name, _Line(summary.records[0]["optimizer"], {}))
        for record, value in zip(summary.records, summary.values):
            line.points.setdefault(average or record["batch"], []).append(value)
    at_batch: dict[int, list[float]] = {}
    for line in lines.values():
        for batch in line.points:
            at_batch.setdefault(batch, []).extend(line.values(batch))
    ticks = sorted({record["batch"] for summary in measured for record in summary.records})
    x_label = "batch size (examples)"
    if separate:
        x_label = "average batch (examples)"
        # Average batches can have any size, so put the ticks at doublings of the smallest batch.
        ticks = [ticks[0] * 2**n for n in range((ticks[-1] // ticks[0]).bit_length())]
    values = [value for column in at_batch.values() for value in column]
    is_log = metric.better == "lower" and 0 < min(values, default=0) < max(values) / _FAR
    forward: Callable[[float], float] = math.log10 if is_log else float
    low, high = _limits([list(map(forward, v)) for v in at_batch.values()], metric.better)
    limits = (10**low, 10**high) if is_log else (low, high)

    split = lines_lib.panels(lines)
    height = 3.3 if len(split) == 1 else 2.6
    figure, panels = style.stacked([height] * len(split), [list(each) for each in split.values()])
    edges: list[list[_Edge]] = []
    for panel, (title, drawn) in zip(panels, split.items(), strict=True):
        axes = panel.subplots()
        axes.set_yscale("log" if is_log else "linear")
        edges.append(_draw_batches(axes, drawn, metric, limits, separate))
        style.dress(axes, title, x_label, metric.label, metric.better, height - 0.75)
        style.batch_axis(axes, ticks)
        style.legend_below(panel)
    x_limits = [panel.axes[0].get_xlim() for panel in panels]
    for panel, annotations in zip(panels, edges, strict=True):
        (axes,) = panel.axes
        axes.set_xlim(min(left for left, _ in x_limits), max(right for _, right in x_limits))
        axes.set_ylim(limits)
        if is_log:
            style.log_axis(axes)
        _name_at_edges(axes, annotations)
    return figure


def _draw_batches(
    axes: Axes,
    lines: Mapping[str, _Line],
    metric: Metric,
    limits: tuple[float, float],
    separate: bool,
) -> list[_Edge]:
    """Draws the lines within the limits, and returns annotations for the points outside."""
    low, high = limits
    looks = lines_lib.looks({name: line.optimizer for name, line in lines.items()})
    edges = []
    shared = Counter(batch for line in lines.values() for batch in line.points)
    drawn_at: Counter[int] = Counter()
    for number, (name, line) in enumerate(lines.items()):
        look, positions = looks[name] | ({"linestyle": ""} if separate else {}), dict[int, float]()
        for batch in sorted(line.points):
            # Draw the lines side by side: intervals at the same position would hide each other.
            position, count = (drawn_at[batch], shared[batch]) if separate else (number, len(lines))
            drawn_at[batch] += 1
            positions[batch] = batch * 2 ** (_STEP * (position - (count - 1) / 2))
        at = [batch for batch in positions if line.values(batch)]
        means = [statistics.fmean(line.values(batch)) for batch in at]
        widths = [half_width(line.values(batch)) or 0.0 for batch in at]
        bars = axes.errorbar(
            [positions[batch] for batch in at], means, widths, label=name, capsize=3, **look
        )
        # Clip the lines at the limits, because annotations are written outside the limits.
        inside = Rectangle((0, low), 1, high - low, transform=axes.get_yaxis_transform())
        for artist in bars.get_children():
            artist.set_clip_path(inside)
        for batch in at:
            axes.plot(
                [positions[batch]] * len(line.values(batch)),
                line.values(batch),
                linestyle="",
                alpha=0.5,
                markersize=3,
                color=look["color"],
                marker=look["marker"],
                clip_path=inside,
            )
        for batch, mean in zip(at, means, strict=True):
            if not low <= mean <= high:
                text = f"{chr(0x2193) if mean < low else chr(0x2191)} {shown(mean, metric)}"
                edges.append(_Edge(positions[batch], text, look["color"], mean < low))
        edges += [
            _Edge(positions[batch], f"×{failed}", look["color"], metric.better == "higher")
            for batch, values in line.points.items()
            if (failed := values.count(None))
        ]
    return edges


def _name_at_edges(axes: Axes, edges: Sequence[_Edge]) -> None:
    """Adds margins at the edges of axes, and writes annotations into them without overlaps."""
    axes_inches = axes.bbox.height / axes.figure.dpi
    rows: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    positions = []  # per annotation: fraction of the width, and row from the edge
    for edge in edges:
        # Horizontal centre of the text, as a fraction of the width of the axes.
        across = axes.transAxes.inverted().transform(axes.transData.transform((edge.position, 1)))[
            0
        ]
        half = style.inches(edge.text) / 2 / (axes.bbox.width / axes.figure.dpi)
        across = min(max(across, half), 1 - half)  # keeps the text off the tick labels
        span, rows_here = (across - half, across + half), rows[edge.is_below]
        level = next(
            (
                level
                for level, row in enumerate(rows_here)
                if all(span[1] < left or right < span[0] for left, right in row)
            ),
            len(rows_here),
        )
        if level == len(rows_here):
            rows_here.append([])
        rows_here[level].append(span)
        positions.append((across, level))
    below, above = (_LEVEL / 72 * len(rows[side]) / axes_inches for side in (True, False))
    inner = max(0.3, 1 - below - above)  # fraction of the height left for the data
    is_log = axes.get_yscale() == "log"
    low, high = np.log10(axes.get_ylim()) if is_log else axes.get_ylim()
    bottom, top = low - (high - low) * below / inner, high + (high - low) * above / inner
    axes.set_ylim((10**bottom, 10**top) if is_log else (bottom, top))
    for edge, (across, level) in zip(edges, positions, strict=True):
        axes.annotate(
            edge.text, (across, 0 if edge.is_below else 1),
            xycoords="axes fraction", textcoords="offset points", ha="center",
            xytext=(0, (2 + _LEVEL * level) * (1 if edge.is_below else -1)),
            va="bottom" if edge.is_below else "top", color=edge.color, fontsize=style.TEXT,
        )  # fmt: skip


def _line_of(summary: Summary) -> str:
    return summary.cell.row or lines_lib.optimizer_name(summary.records[0]["optimizer"])


def _share_a_point(measured: Sequence[Summary]) -> bool:
    """Returns whether any line has two cells with the same batch size."""
    positions = [(_line_of(summary), summary.records[0]["batch"]) for summary in measured]
    return len(set(positions)) < len(positions)


def _limits(columns: Sequence[Sequence[float]], better: str) -> tuple[float, float]:
    """Returns the limits of an axis for the values at each batch size, with a margin.

    Confidence intervals are not considered, because with two seeds they can dwarf the data. The worst values
    are left outside if they are so far from the rest that all other points would look alike. The best value
    at every batch size is inside.
    """
    higher = better == "higher"
    ordered = sorted((value for values in columns for value in values), reverse=higher) or [0.0]
    best = [max(values) if higher else min(values) for values in columns if values]
    for count in range(max(3, len(ordered) // 2), len(ordered)):
        range_of_best = abs(ordered[count - 1] - ordered[0])
        keeps_all = all(value in ordered[:count] for value in best)
        if abs(ordered[count] - ordered[count - 1]) > 3 * range_of_best > 0 and keeps_all:
            ordered = ordered[:count]
            break
    low, high = min(ordered), max(ordered)
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin
