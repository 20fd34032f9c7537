"""The trials of a sweep, ranked by their metric: a table, a page and a picture."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce import jobs
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.results import Results, machine
from lamb_tpu.reproduce.search import Choice, Dimension
from lamb_tpu.reproduce.summary import Summary, measured, summaries
from lamb_tpu.reproduce.sweeps import NAME, Sweep
from lamb_tpu.watch.progress import format_seconds

_COLUMNS = 3  # of axes in the picture


def ranked(sweep: Sweep, results: Results) -> list[Summary]:
    """Returns the trials, the best first; those that diverged or have not run come last."""
    sign = -1 if sweep.scale.metric.better == "higher" else 1

    def order(summary: Summary) -> tuple[int, float]:
        if summary.mean is None:
            return (1 if summary.values else 2), 0.0
        return 0, sign * summary.mean

    return sorted(summaries(sweep.table, sweep.scale, results), key=order)


def rows(sweep: Sweep, found: Sequence[Summary]) -> list[list[str]]:
    """Returns trials as rows of text; the first row has the names of the columns."""
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
            for summary in found
        ),
    ]


def _effort(summary: Summary) -> tuple[str, str]:
    """Returns the updates of a run and the time of all runs of a trial."""
    updates = max(record["updates"] for record in summary.records)
    return f"{updates:,}", format_seconds(sum(record["seconds"] for record in summary.records))


def _short(dimension: Dimension) -> str:
    """Returns a key without its section, unless that leaves only 'name'."""
    last = dimension.key.rpartition(".")[2]
    return dimension.key if last == "name" else last


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def best_command(sweep: Sweep, found: Sequence[Summary]) -> str | None:
    """Returns the command that trains the first of ranked trials; None if it has no value."""
    if found[0].mean is None:
        return None
    (stage,) = jobs.stages(Job(sweep.table, sweep.scale, found[0].cell, 0))
    return stage.command(str(sweep.table.path.parent / "best"))


def page(sweep: Sweep, found: Sequence[Summary]) -> str:
    """Returns the Markdown page of ranked trials, which shows the picture beside it."""
    metric, command = sweep.scale.metric, best_command(sweep, found)
    machines = sorted({machine(record) for summary in found for record in summary.records})
    head, *lines = rows(sweep, found)
    return "\n".join(
        [
            f"# {sweep.table.title}",
            "",
            f"{len(found)} trials, the best first. {metric.label}: {metric.better} is better."
            + (" Means with their 95 % intervals." if sweep.scale.seeds > 1 else ""),
            "",
            f"![{metric.label} against each searched key]({NAME}.png)",
            "",
            "The ring is the best trial; a cross is one that diverged.",
            "",
            *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *lines)),
            "",
            *(["The best trial:", "", "```sh", command, "```", ""] if command else []),
            *([f"Measured on {'; '.join(machines)}.", ""] if machines else []),
        ]
    )


def picture(sweep: Sweep, found: Sequence[Summary]) -> Figure:
    """Plots the metric against each searched key.

    A point is a trial's mean, with its 95 % interval; a cross at the lower edge is a trial with a
    run that diverged. The best trial has a ring. Colours are optimizers, if there are several.
    """
    dimensions, metric = sweep.dimensions, sweep.scale.metric
    columns = min(len(dimensions), _COLUMNS)
    lines = math.ceil(len(dimensions) / columns)
    figure = style.figure(0.8 + 4.2 * columns, 0.6 + 3.3 * lines)
    figure.suptitle(f"{sweep.table.title}: {len(found)} trials", fontsize=11)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
    means = [summary.mean for summary in found if summary.mean is not None]
    for axes, dimension in itertools.zip_longest(grid, dimensions):
        if dimension is None:
            axes.remove()
            continue
        _points(axes, dimension, found)
        style.dress(axes, "", dimension.key, metric.label, metric.better)
        if isinstance(dimension, Choice):
            values = dimension.values
            axes.set_xticks(range(len(values)), [_shown(value) for value in values])
            axes.set_xlim(-0.5, len(values) - 0.5)
        elif dimension.log:
            axes.set_xscale("log")
        # Losses of good and bad trials lie far apart.
        if metric.better == "lower" and means and 0 < min(means) < max(means) / 10:
            style.log_axis(axes)
    if len(_optimizers(found)) > 1:
        figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _optimizers(found: Sequence[Summary]) -> list[str]:
    return sorted({record["optimizer"] for summary in found for record in summary.records})


def _points(axes: Axes, dimension: Dimension, found: Sequence[Summary]) -> None:
    def place(summary: Summary) -> float:
        value = summary.cell.overrides[dimension.key]
        return dimension.values.index(value) if isinstance(dimension, Choice) else value

    for optimizer, look in pictures.looks({name: name for name in _optimizers(found)}).items():
        of_it = [s for s in found if s.records and s.records[0]["optimizer"] == optimizer]
        drawn = [(place(s), s.mean, s.half_width or 0.0) for s in of_it if s.mean is not None]
        at, means, widths = zip(*drawn) if drawn else ((), (), ())
        axes.errorbar(
            at,
            means,
            widths,
            **{**look, "linestyle": ""},
            markersize=5,
            capsize=2,
            label=pictures.optimizer_name(optimizer),
        )
        failed = [place(summary) for summary in of_it if summary.mean is None]
        # Heights are fractions of the axes, because a run that diverged has no value.
        axes.plot(
            failed,
            [0.02] * len(failed),
            color=look["color"],
            marker="x",
            linestyle="",
            transform=axes.get_xaxis_transform(),
        )
    if found[0].mean is not None:
        axes.plot(
            [place(found[0])],
            [found[0].mean],
            color="k",
            marker="o",
            markersize=11,
            markerfacecolor="none",
            linestyle="",
        )
