"""A cell's measurements beside the paper's value, for the terminal and for pages."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy import stats

from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Record, Results
from lamb_tpu.reproduce.tables import Cell, Metric, Scale, Table


class Summary(NamedTuple):
    """Published and measured values of a cell at a scale.

    Attributes:
      cell: the cell.
      published: the paper's value as text; '' if it has none.
      records: of the runs that measure, with the config of today.
      values: their metric in the published unit; None for a run that diverged.
      mean: of the values; None if there are none or one diverged.
      half_width: of the mean's 95 % interval (Student's t); None for fewer than two runs.
      distance: mean minus published; None unless both are numbers.
      stale: how many records have another config, and what changed in the first of them.
      stale_values: their metric, as `values`.
      search: the values that were tried with their means, such as '0.01: 96.9, 0.02: 97.3
        (chosen)'; '' without a complete search.
      status: 'measured', '2 of 5 seeds', 'stale', 'not run', how far the search is, or why the cell
        cannot be run.
      baseline: mean of the cell's baseline; None without one, or if it has no mean.
    """

    cell: Cell
    published: str
    records: Sequence[Record]
    values: Sequence[float | None]
    mean: float | None
    half_width: float | None
    distance: float | None
    stale: tuple[int, Sequence[str]]
    stale_values: Sequence[float | None]
    search: str
    status: str
    baseline: float | None = None


def summaries(table: Table, scale: Scale, results: Results) -> list[Summary]:
    """Returns the summary of every cell of a table at a scale."""
    found = {name: _summary(table, scale, cell, results) for name, cell in table.cells.items()}
    return [
        summary._replace(baseline=found[summary.cell.baseline].mean)
        if summary.cell.baseline
        else summary
        for summary in found.values()
    ]


def _summary(table: Table, scale: Scale, cell: Cell, results: Results) -> Summary:
    metric = scale.metric
    wanted = engine.measurements(table, scale, cell, scale.seeds, results)
    fresh, old, changed = [], [], []
    # More seeds may have been run than the table asks for.
    for record in results:
        if (record["scale"], record["cell"], record["factor"]) != (scale.name, cell.name, None):
            continue
        # Without a complete search, what the record's own search has chosen.
        chosen = wanted[0].chosen if wanted else record.get("chosen") or 1.0
        changes = results.changes(Job(table, scale, cell, record["seed"], None, chosen))
        if changes:
            old.append(record)
            changed.append(changes)
        else:
            fresh.append(record)
    values = _values(fresh, metric)
    numbers = [value for value in values if value is not None]
    mean = statistics.fmean(numbers) if numbers and len(numbers) == len(values) else None
    published = cell.published.get(metric.key)
    if cell.unknown:
        status = cell.unknown
    elif changed and not fresh:
        status = "stale"
    elif wanted is None:
        jobs = engine.searches(table, scale, cell)
        status = f"search: {sum(map(results.holds, jobs))} of {len(jobs)} runs"
    elif fresh:
        count = sum(map(results.holds, wanted))
        status = "measured" if count == len(wanted) else f"{count} of {len(wanted)} seeds"
    else:
        status = "not run"
    return Summary(
        cell,
        shown(published, metric),
        fresh,
        values,
        mean,
        None if mean is None else half_width(numbers),
        mean - published if mean is not None and isinstance(published, (int, float)) else None,
        (len(changed), changed[0] if changed else ()),
        _values(old, metric),
        _search(table, scale, cell, results),
        status,
    )


def _values(records: Sequence[Record], metric: Metric) -> list[float | None]:
    return [
        None if record["values"] is None else metric.factor * record["values"][metric.key]
        for record in records
    ]


def _search(table: Table, scale: Scale, cell: Cell, results: Results) -> str:
    jobs = engine.searches(table, scale, cell)
    means = engine.search_means(jobs, results)
    if table.tuning is None or cell.tuned_by or not means:
        return ""
    best, metric = engine.best_factor(jobs, results), scale.metric
    texts = []
    for job in jobs[:: table.tuning.seeds]:
        assert job.factor is not None
        value = jobs_lib.stages(job)[-1].overrides[table.tuning.key]
        mean = metric.factor * means[job.factor]
        told = shown(mean, metric) if math.isfinite(mean) else "diverged"
        texts.append(f"{value:g}: {told}" + (" (chosen)" if job.factor == best else ""))
    return f"{table.tuning.key} {', '.join(texts)}"


def grid(cells: Sequence[Cell]) -> tuple[list[str], dict[str, list[Cell | None]]]:
    """Returns the columns of a table's matrix, and the cells of each of its rows.

    Both are empty if the cells have no rows and columns. A place without a cell has None.
    """
    if not any(cell.row for cell in cells):
        return [], {}
    columns = list(dict.fromkeys(cell.column for cell in cells))
    places = {(cell.row, cell.column): cell for cell in cells}
    return columns, {
        row: [places.get((row, column)) for column in columns]
        for row in dict.fromkeys(cell.row for cell in cells)
    }


def matrix(found: Sequence[Summary], metric: Metric) -> list[list[str]]:
    """Returns the cells as lines of a matrix, the first with the columns' names; empty if they
    have no rows and columns.

    An entry is what was measured, now or stale, and the published value in parentheses.
    """
    columns, rows = grid([summary.cell for summary in found])
    entries = {
        summary.cell.name: " ".join(
            filter(
                None,
                [
                    measured(summary, metric) or stale_mean(summary, metric) or "-",
                    summary.published and f"({summary.published})",
                ],
            )
        )
        for summary in found
    }
    return (
        [
            ["", *columns],
            *(
                [row, *(entries[cell.name] if cell else "" for cell in cells)]
                for row, cells in rows.items()
            ),
        ]
        if columns
        else []
    )


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the 95 % interval of the mean of some values by Student's t.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf(0.975, len(values) - 1)) * deviation


def shown(value: float | str | None, metric: Metric) -> str:
    """Formats a value of the metric; text as it is, None as ''."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.{metric.digits}f}"


def stale(summary: Summary, metric: Metric) -> str:
    """Formats the stale records, such as '1 stale, 92.0: duration: ...'; '' if there are none."""
    count, changes = summary.stale
    if not count:
        return ""
    values = ", ".join(
        "diverged" if value is None else shown(value, metric) for value in summary.stale_values
    )
    more = f"; {len(changes) - 4} more keys" if len(changes) > 4 else ""
    return f"{count} stale, {values}: {'; '.join(changes[:4])}{more}"


def stale_mean(summary: Summary, metric: Metric) -> str:
    """Formats the mean of the stale records, such as '92.0 stale'; '' if there are none."""
    values = [value for value in summary.stale_values if value is not None]
    return f"{shown(statistics.fmean(values), metric)} stale" if values else ""


def further(summary: Summary, key: str) -> str:
    """Formats the mean of a further column of a table, such as '1,172'; '' if nothing is measured.

    Args:
      summary: of a cell.
      key: one of `tables.COLUMNS`.
    """
    if key == "to_baseline":
        if summary.mean is None or not summary.baseline:
            return ""
        return f"{100 * (summary.mean / summary.baseline - 1):+.2f}"
    values = [
        value
        for record in summary.records
        if record["updates"] and (value := _COLUMNS[key](record)) is not None
    ]
    return f"{statistics.fmean(values):,.0f}" if values else ""


def average_batch(record: Record) -> float:
    """Returns the examples of a run's updates over their number."""
    # Older records have no examples: their batches were constant.
    updates = record["updates"]
    return float(record.get("examples", updates * record["batch"]) / updates)


# A run on one device sends nothing and has no such number.
_COLUMNS: dict[str, Callable[[Record], float | None]] = {
    "updates": lambda record: record["updates"],
    "average_batch": average_batch,
    "sent_bytes": lambda record: record.get("sent_bytes"),
}


def measured(summary: Summary, metric: Metric) -> str:
    """Formats the mean with its interval, such as '0.9940 ± 0.0006'; '' if nothing is measured."""
    if not summary.values:
        return ""
    failed = sum(value is None for value in summary.values)
    if failed:
        return f"{failed} of {len(summary.values)} diverged"
    mean = shown(summary.mean, metric)
    if summary.half_width is None:
        return mean
    return f"{mean} ± {summary.half_width:.{metric.digits}f}"
