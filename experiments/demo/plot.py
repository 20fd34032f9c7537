"""The picture of a study: accuracy against batch size, and over epochs at the largest one."""

import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments.demo.study import Record
from lamb_tpu import style

_LOW = 70.0  # percent


def draw(rows: Mapping[str, Sequence[Record]], path: pathlib.Path, title: str) -> None:
    """Draws a study as a PNG.

    Left: test accuracy against batch size, a faint mark for each seed, a line through the means;
    lines stand a little beside one another. Where others do well, its axis leaves out means under
    `_LOW`, which are written at its foot.
    Right: test accuracy over the epochs at the largest batch, mean of the seeds, with a band from
    the worst to the best.

    Args:
      rows: the records of each line, by its label; of one optimizer each.
      path: the picture.
      title: data, model, and where the rates come from.
    """
    figure = style.figure(11, 5.0)
    figure.suptitle(title, fontsize=12)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    batch_sizes = sorted({record["batch_size"] for records in rows.values() for record in records})
    means = {label: _means(records) for label, records in rows.items()}
    bottom = _bottom([value for line in means.values() for value in line.values()])
    drawn: list[str] = []
    for index, (label, records) in enumerate(rows.items()):
        if not records:
            continue
        optimizer = records[0]["optimizer"]
        look = style.line(optimizer, drawn.count(optimizer))
        drawn.append(optimizer)
        aside = 2 ** (0.1 * (index - (len(rows) - 1) / 2))
        points = {size * aside: mean for size, mean in means[label].items()}
        left.plot(list(points), list(points.values()), label=label, **look)
        finished = [record for record in records if record["accuracy"] is not None]
        left.plot(
            [record["batch_size"] * aside for record in finished],
            [100 * record["accuracy"] for record in finished],
            linestyle="none", color=look["color"], marker=look["marker"], markersize=4, alpha=0.4,
            markeredgewidth=0,
        )  # fmt: skip
        for x, mean in points.items():
            if mean < bottom:
                left.annotate(
                    f"{mean:.0f} %\n\u2193", (x, bottom), xytext=(0, 4), color=look["color"],
                    textcoords="offset points", ha="center", fontsize=9,
                )  # fmt: skip
        largest = [record for record in records if record["batch_size"] == batch_sizes[-1]]
        _draw_epochs(right, largest, look)

    seeds = len({record["seed"] for records in rows.values() for record in records})
    style.dress(
        left, "after training" + (f", {seeds} seeds" if seeds > 1 else ""), "batch size (examples)",
        "test accuracy (%)", "higher",
    )
    style.batch_axis(left, batch_sizes)
    left.set_ylim(bottom, 100)
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(rows), frameon=False)
    style.dress(
        right, f"on the way, at batch {batch_sizes[-1]:,}", "epochs", "test accuracy (%)", "higher"
    )
    right.set_ylim(0, 100)
    right.set_xlim(left=0)
    figure.savefig(path)


def _means(records: Sequence[Record]) -> dict[int, float]:
    """Returns the mean accuracy in percent, by ascending batch size; none where a run diverged."""
    accuracies: dict[int, list[float]] = {}
    for record in records:
        accuracy = math.nan if record["accuracy"] is None else 100 * record["accuracy"]
        accuracies.setdefault(record["batch_size"], []).append(accuracy)
    return {
        batch_size: statistics.fmean(values)
        for batch_size, values in sorted(accuracies.items())
        if not math.isnan(sum(values))
    }


def _draw_epochs(axes: Axes, records: Sequence[Record], look: Mapping[str, Any]) -> None:
    # A run that diverged has a shorter curve: the line ends with it.
    points = list(zip(*(record["curve"] for record in records), strict=False))
    epochs = [point[0][0] for point in points]
    values = [[100 * accuracy for _, accuracy in point] for point in points]
    means = [statistics.fmean(point) for point in values]
    axes.plot(epochs, means, **{**look, "markersize": 3})
    axes.fill_between(
        epochs, [min(point) for point in values], [max(point) for point in values],
        color=look["color"], alpha=0.15, linewidth=0,
    )  # fmt: skip


def _bottom(means: Sequence[float]) -> float:
    """Returns the lower end of the left axis: a multiple of 5 below all means that are not low."""
    high = [mean for mean in means if mean >= _LOW]
    return 5 * math.floor((min(high) - 2) / 5) if high else 0.0
