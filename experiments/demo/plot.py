"""The picture of the study: accuracy against batch size, and over epochs at the largest one."""

import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.demo.study import Record
from lamb_tpu.metrics import read_records

# Colours that people with any colour vision can tell apart (Okabe and Ito), and a marker each.
_STYLES = (("#D55E00", "s"), ("#7F7F7F", "^"), ("#009E73", "D"), ("#0072B2", "o"))
_LOW = 70.0  # percent


def draw(rows: Mapping[str, Sequence[Record]], out: pathlib.Path, path: pathlib.Path) -> None:
    """Draws the study as a PNG.

    Left: test accuracy against batch size, a faint mark for each seed, a line through the means;
    lines stand a little beside one another. Where others do well, its axis leaves out means under
    `_LOW`, which are written at its foot.
    Right: test accuracy over the epochs at the largest batch, mean of the seeds, with a band from
    the worst to the best.

    Args:
      rows: the records of each line, by its label.
      out: the folder of the study, where the runs' metrics lie.
      path: the picture.
    """
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    batch_sizes = sorted({record["batch_size"] for records in rows.values() for record in records})
    means = {label: _means(records) for label, records in rows.items()}
    bottom = _bottom([value for line in means.values() for value in line.values()])
    for index, ((label, records), (color, marker)) in enumerate(
        zip(rows.items(), _STYLES, strict=False)
    ):
        aside = 2 ** (0.1 * (index - (len(rows) - 1) / 2))
        points = {size * aside: mean for size, mean in means[label].items()}
        left.plot(list(points), list(points.values()), color=color, marker=marker, label=label)
        finished = [record for record in records if record["accuracy"] is not None]
        left.plot(
            [record["batch_size"] * aside for record in finished],
            [100 * record["accuracy"] for record in finished],
            linestyle="none", color=color, marker=marker, markersize=4, alpha=0.4,
            markeredgewidth=0,
        )  # fmt: skip
        for x, mean in points.items():
            if mean < bottom:
                left.annotate(
                    f"{mean:.0f} % \u2193", (x, bottom), xytext=(0, 4), color=color,
                    textcoords="offset points", ha="center", fontsize=9,
                )  # fmt: skip
        largest = [record for record in records if record["batch_size"] == batch_sizes[-1]]
        _draw_epochs(right, largest, out, color, marker)

    seeds = len({record["seed"] for records in rows.values() for record in records})
    left.set_title("Test accuracy after training" + (f", {seeds} seeds" if seeds > 1 else ""))
    left.set_xscale("log", base=2)
    left.set_xticks(batch_sizes, [f"{size:,}" for size in batch_sizes])
    left.minorticks_off()
    left.set_xlabel("batch size (base rates are for 32)")
    left.set_ylabel("test accuracy, %")
    left.set_ylim(bottom, 100)
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(rows), frameon=False)
    right.set_title(f"On the way, at batch {batch_sizes[-1]:,}")
    right.set_xlabel("epoch")
    right.set_ylabel("test accuracy, %")
    right.set_ylim(0, 100)
    right.set_xlim(left=0)
    for axes in (left, right):
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _means(records: Sequence[Record]) -> dict[int, float]:
    """Mean accuracy in percent for each batch size; none where a run diverged."""
    accuracies: dict[int, list[float]] = {}
    for record in records:
        accuracy = math.nan if record["accuracy"] is None else 100 * record["accuracy"]
        accuracies.setdefault(record["batch_size"], []).append(accuracy)
    return {
        batch_size: statistics.fmean(values)
        for batch_size, values in accuracies.items()
        if not math.isnan(sum(values))
    }


def _draw_epochs(
    axes: Axes, records: Sequence[Record], out: pathlib.Path, color: str, marker: str
) -> None:
    curves = [
        [
            (record["epoch"], 100 * record["accuracy"])
            for record in read_records(out / "runs" / record["name"] / "metrics.jsonl", "eval")
        ]
        for record in records
    ]
    # A run that diverged has a shorter curve: the line ends with it.
    points = list(zip(*curves, strict=False))
    epochs = [point[0][0] for point in points]
    values = [[accuracy for _, accuracy in point] for point in points]
    means = [statistics.fmean(point) for point in values]
    axes.plot(epochs, means, color=color, marker=marker, markersize=3)
    axes.fill_between(
        epochs, [min(point) for point in values], [max(point) for point in values],
        color=color, alpha=0.15, linewidth=0,
    )  # fmt: skip


def _bottom(means: Sequence[float]) -> float:
    """Where the left axis begins: a multiple of 5 below all means that are not low."""
    high = [mean for mean in means if mean >= _LOW]
    return 5 * math.floor((min(high) - 2) / 5) if high else 0.0
