"""The trials of a sweep, ranked by their metric: a table, a page and a figure."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce import jobs
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.report import lines as lines_lib
from lamb_tpu.reproduce.results import Results, machine
from lamb_tpu.reproduce.search import Choice, Dimension
from lamb_tpu.reproduce.summary import Summary, measured, summaries
from lamb_tpu.reproduce.sweeps import NAME, Sweep
from lamb_tpu.watch.progress import format_seconds

_COLUMNS = 3  # number of columns of axes in the figure


def ranked(sweep: Sweep, results: Results) -> list[Summary]:
    """Returns the trials, best first. Diverged trials and trials without runs come last."""
    sign = -1 if sweep.scale.metric.better == "higher" else 1

    def order(summary: Summary) -> tuple[int, float]:
        if summary.mean is None:
            return (1 if summary.values else 2), 0.0
        return 0, sign * summary.mean

    return sorted(summaries(sweep.table, sweep.scale, results), key=order)


def rows(sweep: Sweep, ranking: Sequence[Summary]) -> list[list[str]]:
    """Returns the trials as rows of text, after a row of column names."""
    metric = sweep.scale.metric
    names = [_short(dimension) for dimension in sweep.dimensions]
    return [
        ["trial", *names, metric.label, "seeds", "updates", "time"],
        *(
            [
                summary.cell.name,
                *(_shown(summary.cell.overrides[d.key]) for d in sweep.dimensions),
                measured(summary, metric) or summary.status,
                str(len(summary.records) or ""),
                *(_effort(summary) if summary.records else ("", "")),
            ]
            for summary in ranking
        ),
    ]


def _effort(summary: Summary) -> tuple[str, str]:
    updates = max(record["updates"] for record in summary.records)
    return f"{updates:,}", format_seconds(sum(record["seconds"] for record in summary.records))


def _short(dimension: Dimension) -> str:
    """Returns a key without its section, unless that leaves only 'name'."""
    last = dimension.key.rpartition(".")[2]
    return dimension.key if last == "name" else last


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def best_command(sweep: Sweep, ranking: Sequence[Summary]) -> str | None:
    """Returns the command that trains the best trial of a ranking; None if no trial has a value."""
    if ranking[0].mean is None:
        return None
    (stage,) = jobs.stages(Job(sweep.table, sweep.scale, ranking[0].cell, 0))
    return stage.command(str(sweep.table.path.parent / "best"))


def page(sweep: Sweep, ranking: Sequence[Summary]) -> str:
    """Returns the Markdown page of ranked trials, with a link to the figure."""
    metric, command = sweep.scale.metric, best_command(sweep, ranking)
    machines = sorted({machine(record) for summary in ranking for record in summary.records})
    head, *lines = rows(sweep, ranking)
    return "\n".join(
        [
            f"# {sweep.table.title}",
            "",
            f"{len(ranking)} trials, best first. {metric.label}: {metric.better} is better."
            + (" Means with their 95 % intervals." if sweep.scale.seeds > 1 else ""),
            "",
            f"![{metric.label} against each searched key]({NAME}.png)",
            "",
            "The ring marks the best trial; a cross marks a trial that diverged.",
            "",
            *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *lines)),
            "",
            *(["The best trial:", "", "```sh", command, "```", ""] if command else []),
            *([f"Measured on {'; '.join(machines)}.", ""] if machines else []),
        ]
    )


def draw(sweep: Sweep, ranking: Sequence[Summary]) -> Figure:
    """Plots the metric against each searched key.

    A point is a trial's mean with its 95 % interval; a cross at the lower edge is a trial with a
    diverged run. A ring marks the best trial. If there are several optimizers, colours distinguish them.
    """
    dimensions, metric = sweep.dimensions, sweep.scale.metric
    columns = min(len(dimensions), _COLUMNS)
    lines = math.ceil(len(dimensions) / columns)
    figure = style.figure(0.8 + 4.2 * columns, 0.6 + 3.3 * lines)
    figure.suptitle(f"{sweep.table.title}: {len(ranking)} trials", fontsize=11)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
    means = [summary.mean for summary in ranking if summary.mean is not None]
    for axes, dimension in itertools.zip_longest(grid, dimensions):
        if dimension is None:
            axes.remove()
            continue
        _points(axes, dimension, ranking)
        style.dress(axes, "", dimension.key, metric.label, metric.better)
        if isinstance(dimension, Choice):
            values = dimension.values
            axes.set_xticks(range(len(values)), [_shown(value) for value in values])
            axes.set_xlim(-0.5, len(values) - 0.5)
        elif dimension.log:
            axes.set_xscale("log")
        # Losses of good and bad trials may differ by orders of magnitude.
        if metric.better == "lower" and means and 0 < min(means) < max(means) / 10:
            style.log_axis(axes)
    if len(_optimizers(ranking)) > 1:
        style.legend_below(figure)
    return figure


def _optimizers(ranking: Sequence[Summary]) -> list[str]:
    return sorted({record["optimizer"] for summary in ranking for record in summary.records})


def _points(axes: Axes, dimension: Dimension, ranking: Sequence[Summary]) -> None:
    def position(summary: Summary) -> float:
        value = summary.cell.overrides[dimension.key]
        return dimension.values.index(value) if isinstance(dimension, Choice) else value

    for optimizer, look in lines_lib.looks({name: name for name in _optimizers(ranking)}).items():
        group = [s for s in ranking if s.records and s.records[0]["optimizer"] == optimizer]
        drawn = [(position(s), s.mean, s.half_width or 0.0) for s in group if s.mean is not None]
        at, means, widths = zip(*drawn) if drawn else ((), (), ())
        axes.errorbar(
            at,
            means,
            widths,
            **{**look, "linestyle": ""},
            markersize=5,
            capsize=2,
            label=lines_lib.optimizer_name(optimizer),
        )
        failed = [position(summary) for summary in group if summary.mean is None]
        # A diverged run has no value, so its cross is placed at a fraction of the height of the axes.
        axes.plot(
            failed,
            [0.02] * len(failed),
            color=look["color"],
            marker="x",
            linestyle="",
            transform=axes.get_xaxis_transform(),
        )
    if ranking[0].mean is not None:
        axes.plot(
            [position(ranking[0])],
            [ranking[0].mean],
            color="k",
            marker="o",
            markersize=11,
            markerfacecolor="none",
            linestyle="",
        )
