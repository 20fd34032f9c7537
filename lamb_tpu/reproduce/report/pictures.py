"""Pictures of a table's runs: against the batch, over training, trust ratios of the layers."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce.results import Record
from lamb_tpu.reproduce.summary import Summary, average_batch, half_width, shown
from lamb_tpu.reproduce.tables import Metric, Scale

# The text below each picture.
CAPTIONS = {
    "batches": "Mean over the seeds with its 95 % interval (Student's t); a small point is a seed. "
    "An interval wider than the picture is cut; a mean far below or above is named at the edge. "
    "Where cells of an optimizer share a batch, each is a point of its own, at its average batch.",
    "training": "A line for each seed.",
    "ratios": "Trust ratio of each layer that adapts, of the first seed, from the first layer to "
    "the last; grey where there is none. Each optimizer has its smallest and its largest batch.",
    "plans": "Learning rate over the run, as the config plans it.",
}
_STEP = 0.08  # between lines at one batch, in octaves
_IN_AXES = 4  # with more lines the legend is below the axes
_EDGE = 0.1  # height of a name at the edge, as a share of the axes'
_LABELS = 40  # beyond, only every n-th layer has its name


def all_of(scale: Scale, found: Sequence[Summary]) -> dict[str, Figure]:
    """Returns the pictures of a table at a scale, by name; only those that have something to show.

    The pictures are 'batches', 'training' and 'ratios'.
    """
    measured = [summary for summary in found if summary.records]
    records = [record for summary in measured for record in summary.records]
    drawn = {}
    if len({record["batch"] for record in records}) > 1:
        drawn["batches"] = batches(measured, scale.metric)
    if any(record["losses"] for record in records):
        drawn["training"] = training(measured, scale.metric)
    if any(_adapting(record) for record in records):
        drawn["ratios"] = ratios(measured)
    return drawn


def batches(measured: Sequence[Summary], metric: Metric) -> Figure:
    """Plots the metric against the batch, a line for each row of the table, or optimizer.

    A small point is a seed; a large one is the mean, with its 95 % interval (Student's t). A run
    that diverged has no point. If cells of a line have the same batch, as those that start with it
    and change it, every cell has a point of its own, at its average batch.
    """
    apart = _share_a_point(measured)
    lines: dict[str, dict[int, list[float]]] = {}
    optimizers: dict[str, str] = {}
    for summary in measured:
        # Of all seeds: where gradients decide, each seed has another one.
        average = round(statistics.fmean(map(average_batch, summary.records))) if apart else None
        for record, value in zip(summary.records, summary.values):
            name = summary.cell.name if apart else _line_of(summary)
            optimizers.setdefault(name, record["optimizer"])
            batch = average or record["batch"]
            points = lines.setdefault(name, {}).setdefault(batch, [])
            points += [] if value is None else [value]
    many = apart or len(lines) > _IN_AXES
    figure = style.figure(7.5, 6.0 if apart else 5.2 if many else 4.6)
    axes = figure.subplots()
    styles = looks(optimizers)
    at_batch: dict[int, list[float]] = {}
    for seeds in lines.values():
        for batch, values in seeds.items():
            at_batch.setdefault(batch, []).extend(values)
    low, high = _limits(list(at_batch.values()), metric.better)
    outside: list[tuple[float, int, float, str]] = []  # place, batch, mean and colour
    for number, (name, seeds) in enumerate(lines.items()):
        # Side by side, because intervals in one place would hide each other.
        shift = 1 if apart else 2 ** (_STEP * (number - (len(lines) - 1) / 2))
        at = [batch for batch in sorted(seeds) if seeds[batch]]
        means = [statistics.fmean(seeds[batch]) for batch in at]
        widths = [half_width(seeds[batch]) or 0.0 for batch in at]
        look, places = styles[name], [batch * shift for batch in at]
        axes.errorbar(places, means, widths, label=name, capsize=3, **look)
        for place, batch in zip(places, at, strict=True):
            axes.plot(
                [place] * len(seeds[batch]),
                seeds[batch],
                linestyle="",
                alpha=0.5,
                markersize=3,
                color=look["color"],
                marker=look["marker"],
            )
        outside += [
            (place, batch, mean, look["color"])
            for place, batch, mean in zip(places, at, means, strict=True)
            if not low <= mean <= high
        ]
    every = sorted({record["batch"] for summary in measured for record in summary.records})
    of_batch = "batch size (examples)"
    if apart:
        of_batch = "average batch (examples)"
        # Averages lie anywhere between the batches, which may be few.
        every = [every[0] * 2**n for n in range((every[-1] // every[0]).bit_length())]
    style.dress(axes, "", of_batch, metric.label, metric.better)
    style.batch_axis(axes, every)
    axes.set_ylim(low, high)
    _name_at_edges(axes, outside, metric)
    if many:
        _legend_below(figure, len(lines))
    else:
        axes.legend(frameon=False, fontsize=8)
    return figure


def _name_at_edges(
    axes: Axes, outside: Sequence[tuple[float, int, float, str]], metric: Metric
) -> None:
    """Names the means outside of the axes' limits at their edges, in room that it adds there.

    Args:
      axes: the axes, with the limits of what is drawn within.
      outside: place on the x axis, batch, mean and colour of each.
      metric: what the axes show.
    """
    low, high = axes.get_ylim()
    most_below = max(Counter(at for _, at, mean, _ in outside if mean < low).values(), default=0)
    most_above = max(Counter(at for _, at, mean, _ in outside if mean > high).values(), default=0)
    room = _EDGE * (high - low)
    bottom, top = low - room * most_below, high + room * most_above
    axes.set_ylim(bottom, top)
    drawn: Counter[tuple[int, bool]] = Counter()
    for place, batch, mean, color in outside:
        text, is_below = shown(mean, metric), mean < low
        offset = 4 + 24 * drawn[batch, is_below]  # points; several stand above each other
        drawn[batch, is_below] += 1
        axes.annotate(
            f"{text}\n\u2193" if is_below else f"\u2191\n{text}",
            (place, bottom if is_below else top),
            xytext=(0, offset if is_below else -offset),
            textcoords="offset points",
            ha="center",
            va="bottom" if is_below else "top",
            color=color,
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # lines pass behind it
        )


def _line_of(summary: Summary) -> str:
    return summary.cell.row or optimizer_name(summary.records[0]["optimizer"])


def _share_a_point(measured: Sequence[Summary]) -> bool:
    """Returns whether two cells of a line have the same batch."""
    places = [(_line_of(summary), summary.records[0]["batch"]) for summary in measured]
    return len(set(places)) < len(places)


def _legend_below(figure: Figure, count: int) -> None:
    """Puts a legend of `count` names below the axes, with as many columns as have room, up to 6."""
    for columns in range(max(1, min(count, 6)), 0, -1):
        legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _limits(columns: Sequence[Sequence[float]], better: str) -> tuple[float, float]:
    """Returns the limits of an axis of measured values, with some room.

    The interval of two seeds can be many times as wide as all values, and a few runs that failed
    can be so far from the others that nothing would be seen of these: both are left out.

    Args:
      columns: the values at each batch; every batch keeps a value within the limits.
      better: of the metric.
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
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def training(measured: Sequence[Summary], metric: Metric) -> Figure:
    """Plots the training loss over updates and the metric over epochs; a line for each seed.

    Cells that have a column, such as a batch, share the axes of their column.
    """
    columns = list(dict.fromkeys(summary.cell.column for summary in measured))
    names = {summary.cell.name: summary.cell.row or summary.cell.name for summary in measured}
    styles = looks(
        {names[summary.cell.name]: summary.records[0]["optimizer"] for summary in measured}
    )
    if len(columns) == 1:
        figure = style.figure(10, 4.2)
        axes = np.reshape(figure.subplots(1, 2), (2, 1))
    else:
        figure = style.figure(min(3.3 * len(columns) + 0.7, 14), 6.4)
        axes = figure.subplots(2, len(columns), sharey="row")
    known = set()
    for summary in measured:
        top, bottom = axes[:, columns.index(summary.cell.column)]
        name = names[summary.cell.name]
        for record in summary.records:
            label = None if name in known else name
            known.add(name)
            _curve(top, record["losses"], styles[name], label)
            points = [
                [epoch, metric.factor * value]
                for epoch, value in record["evaluations"]
                if value is not None
            ]
            _curve(bottom, points, styles[name], None)
    for column, (top, bottom) in zip(columns, axes.T, strict=True):
        style.dress(top, column, "completed updates", "training loss")
        style.dress(bottom, "", "epochs", metric.label)
        for axis in (top, bottom):
            axis.locator_params("x", nbins=4)  # more numbers touch in a narrow column
    for axis in axes[:, 1:].flat:
        axis.set_ylabel("")
    if all(value > 0 for s in measured for record in s.records for _, value in record["losses"]):
        for top in axes[0]:
            style.log_axis(top)
    _legend_below(figure, len(known))
    return figure


def ratios(measured: Sequence[Summary]) -> Figure:
    """Plots the trust ratio of each layer over training: for each optimizer the cells with the
    smallest and the largest batch.
    """
    by_optimizer: dict[str, list[tuple[str, Record]]] = {}
    for summary in measured:
        record = summary.records[0]
        if _adapting(record):
            by_optimizer.setdefault(record["optimizer"], []).append((summary.cell.name, record))
    chosen: dict[str, Record] = {}
    for found in by_optimizer.values():
        found.sort(key=lambda pair: pair[1]["batch"])
        chosen |= dict([found[0], found[-1]])
    heights = [0.6 + min(max(0.16 * len(_adapting(r)), 1.0), 6.0) for r in chosen.values()]
    figure = style.figure(8.5, sum(heights) + 0.4 * len(heights))
    panels = figure.subplots(len(chosen), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, record) in zip(panels, chosen.items(), strict=True):
        histories = _adapting(record)
        layers = list(histories)
        steps = [step for step, _ in histories[layers[0]]]
        values = [
            [np.nan if value is None else value for _, value in history]
            for history in histories.values()
        ]
        style.heat_map(axes, "trust ratio", steps, np.array(values))
        axes.set_title(f"{name}, batch {record['batch']:,}", fontsize=11)
        stride = -(-len(layers) // _LABELS)
        # Row n of the map extends from n to n + 1; its name stands in the middle.
        axes.set_yticks(np.arange(0, len(layers), stride) + 0.5, layers[::stride], fontsize=7)
    return figure


def _adapting(record: Record) -> dict[str, list[tuple[int, float | None]]]:
    """Returns the ratios of the layers that adapt; the others have 1 all the time."""
    return {
        layer: history
        for layer, history in record["ratios"].items()
        if any(value not in (None, 1) for _, value in history)
    }


def optimizer_name(optimizer: str) -> str:
    """Returns an optimizer's name for readers."""
    look = style.OPTIMIZERS.get(optimizer.removesuffix("_tf"))
    return optimizer if look is None else look.name


def looks(optimizers: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the arguments of `Axes.plot` for lines by name, each given with its optimizer.

    An optimizer has its own colour, its second line is dashed. With more lines of one optimizer,
    or with an optimizer without a colour, colours count the lines.
    """
    count: dict[str, int] = {}
    found = {}
    for name, optimizer in optimizers.items():
        optimizer = optimizer.removesuffix("_tf")
        variant = count.get(optimizer, 0)
        count[optimizer] = variant + 1
        if variant > 1 or optimizer not in style.OPTIMIZERS:
            return {line: style.numbered(number) for number, line in enumerate(optimizers)}
        found[name] = {**style.line(optimizer), "linestyle": "--" if variant else "-"}
    return found


def _curve(
    axes: Axes, points: Iterable[Sequence[float]], look: Mapping[str, Any], label: str | None
) -> None:
    if drawn := list(points):
        x, y = zip(*drawn)
        marker = look["marker"] if len(drawn) == 1 else ""  # a line of one point cannot be seen
        axes.plot(x, y, **{**look, "marker": marker, "linewidth": 1.2}, label=label)
