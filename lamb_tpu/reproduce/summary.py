"""Summarizes a cell's measurements beside the paper's value, for the terminal and for pages."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from scipy import stats

from lamb_tpu.reproduce import divergence, engine, timing
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Record, Results
from lamb_tpu.reproduce.tables import Cell, Metric, Scale, Table


class Summary(NamedTuple):
    """Published and measured values of a cell at a scale.

    Attributes:
      published: the paper's value as text; '' if the paper has none.
      records: records of the measurements with the current config.
      values: metric of each record in the published unit; None for a diverged run (`divergence`).
      mean: mean of `values`; None if they are empty or a run diverged.
      half_width: half the 95 % interval of the mean (Student's t); None for fewer than two runs.
      distance: mean minus the published number; None if either is missing, or if the scale is not the
        paper's, because then the two numbers are not comparable.
      stale: records of the measurements with another config.
      changes: the changes in the config since the first stale record.
      search: searched values and their means, such as '0.01: 96.9, 0.02: 97.3 (chosen)'; '' without
        a complete search.
      status: 'measured', '2 of 5 seeds', 'stale', 'not run', the progress of the search, or why the
        cell cannot be run.
      baseline: values of the baseline cell; empty without such a cell, or if one of its runs diverged.
    """

    cell: Cell
    published: str
    records: Sequence[Record]
    values: Sequence[float | None]
    mean: float | None
    half_width: float | None
    distance: float | None
    stale: Sequence[Record]
    changes: Sequence[str]
    search: str
    status: str
    baseline: Sequence[float] = ()

    def job(self, table: Table, scale: Scale) -> Job:
        """Returns the cell's run with seed 0 and the best value of its search."""
        chosen = self.records[0].get("chosen") if self.records else None
        return Job(table, scale, self.cell, seed=0, chosen=chosen or 1.0)


def summaries(table: Table, scale: Scale, results: Results) -> list[Summary]:
    """Returns the summary of every cell of a table at a scale."""
    by_name = {name: _summary(table, scale, cell, results) for name, cell in table.cells.items()}
    for name, cell in table.cells.items():
        if cell.baseline:
            baseline = _numbers(by_name[cell.baseline])
            by_name[name] = by_name[name]._replace(baseline=baseline)
    return list(by_name.values())


def _numbers(summary: Summary) -> list[float]:
    """Returns the values of a cell; empty if one of its runs diverged."""
    values = [value for value in summary.values if value is not None]
    return values if len(values) == len(summary.values) else []


def _summary(table: Table, scale: Scale, cell: Cell, results: Results) -> Summary:
    metric = scale.metric
    wanted = engine.measurements(table, scale, cell, scale.seeds, results)
    fresh, old, since = list[Record](), list[Record](), list[str]()
    # The records may have more seeds than the table requests.
    for record in results:
        if (record["scale"], record["cell"], record["factor"]) != (scale.name, cell.name, None):
            continue
        # If the search is not complete, use the factor that was chosen for the record.
        chosen = wanted[0].chosen if wanted else record.get("chosen") or 1.0
        changes = results.changes(Job(table, scale, cell, record["seed"], chosen=chosen))
        (old if changes else fresh).append(record)
        since = since or changes
    values = [divergence.value(record, metric) for record in fresh]
    numbers = [value for value in values if value is not None]
    mean = statistics.fmean(numbers) if numbers and len(numbers) == len(values) else None
    published = cell.published.get(metric.key)
    distance = None
    if scale.name == "paper" and mean is not None and isinstance(published, (int, float)):
        distance = mean - published
    if cell.unknown:
        status = cell.unknown
    elif old and not fresh:
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
        cell=cell,
        published=shown(published, metric),
        records=fresh,
        values=values,
        mean=mean,
        half_width=None if mean is None else half_width(numbers),
        distance=distance,
        stale=old,
        changes=since,
        search=_search(table, scale, cell, results),
        status=status,
    )


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
        text = shown(mean, metric) if math.isfinite(mean) else "diverged"
        texts.append(f"{value:g}: {text}" + (" (chosen)" if job.factor == best else ""))
    return f"{table.tuning.key} {', '.join(texts)}"


def cost(scale: Scale, cells: Sequence[Summary]) -> str:
    """Returns hardware and time of a run (see `timing`); uses stale runs only if no run is current."""
    fresh = [record for summary in cells for record in summary.records]
    return timing.cost(scale, fresh or [record for summary in cells for record in summary.stale])


def criterion(cells: Sequence[Summary], metric: Metric) -> str:
    """Returns the criterion for diverged runs as a sentence; '' if no run of the cells diverged."""
    failed = any(
        divergence.value(record, metric) is None
        for summary in cells
        for record in (*summary.records, *summary.stale)
    )
    return divergence.criterion(metric) if failed else ""


def grid(cells: Sequence[Cell]) -> tuple[list[str], dict[str, list[Cell | None]]]:
    """Returns the columns of a table's matrix, and the cells of each row (None for a missing cell).

    Both are empty if the cells have no rows and columns.
    """
    if not any(cell.row for cell in cells):
        return [], {}
    columns = list(dict.fromkeys(cell.column for cell in cells))
    by_position = {(cell.row, cell.column): cell for cell in cells}
    return columns, {
        row: [by_position.get((row, column)) for column in columns]
        for row in dict.fromkeys(cell.row for cell in cells)
    }


def matrix(
    cells: Sequence[Summary], metric: Metric, planned: Mapping[str, str] = {}
) -> list[list[str]]:
    """Returns the cells as rows of a matrix, after a row of column names; [] without columns.

    Each entry is the measured value (current or stale), or else the cell's value in `planned`, which maps
    cell names to texts. The published value follows in parentheses.
    """
    columns, rows = grid([summary.cell for summary in cells])
    if not columns:
        return []
    entries = {}
    for summary in cells:
        plan = planned.get(summary.cell.name, "")
        value = measured(summary, metric) or stale_mean(summary, metric)
        value = value or (f"planned {plan}" if plan else "-")
        paper = f" ({summary.published})" if summary.published else ""
        entries[summary.cell.name] = value + paper
    return [["", *columns]] + [
        [row, *(entries[cell.name] if cell else "" for cell in line)] for row, line in rows.items()
    ]


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the 95 % interval of the mean of some values (Student's t).

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf(0.975, len(values) - 1)) * deviation


def shown(value: float | str | None, metric: Metric) -> str:
    """Formats a value of the metric. Text stays as it is; None becomes ''."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.{metric.digits}f}"


def stale(summary: Summary, metric: Metric) -> str:
    """Formats the stale records, such as '1 stale, 92.0: duration: ...'; '' if there are none."""
    if not summary.stale:
        return ""
    values = ", ".join(divergence.text(record, metric) for record in summary.stale)
    changes = summary.changes
    more = f"; {len(changes) - 4} more keys" if len(changes) > 4 else ""
    return f"{len(summary.stale)} stale, {values}: {'; '.join(changes[:4])}{more}"


def stale_mean(summary: Summary, metric: Metric) -> str:
    """Formats the mean of the stale records, such as '92.0 stale'; '' if there are none."""
    values = [divergence.value(record, metric) for record in summary.stale]
    if not values:
        return ""
    return f"{_mean(values, metric)}{', stale' if None in values else ' stale'}"


def _mean(values: Sequence[float | None], metric: Metric) -> str:
    """Formats the mean of some runs, such as '0.9840' or '3 of 5 at 0.9840; 2 diverged'."""
    numbers = [value for value in values if value is not None]
    failed = len(values) - len(numbers)
    if not numbers:
        return f"{failed} of {len(values)} diverged"
    mean = shown(statistics.fmean(numbers), metric)
    return f"{len(numbers)} of {len(values)} at {mean}; {failed} diverged" if failed else mean


def column_value(summary: Summary, key: str) -> str:
    """Formats the mean of a column of `tables.COLUMNS`, such as '1,172'; '' if nothing is measured."""
    if key == "to_baseline":
        return _to_baseline(_numbers(summary), summary.baseline)
    numbers = [value for value in summary.values if value is not None]
    # If every run diverged, use the diverged runs.
    values = [
        number
        for record, value in zip(summary.records, summary.values, strict=True)
        if (value is not None or not numbers)
        and record["updates"]
        and (number := _COLUMNS[key](record)) is not None
    ]
    return f"{statistics.fmean(values):,.0f}" if values else ""


def _to_baseline(values: Sequence[float], baseline: Sequence[float]) -> str:
    """Formats the difference in percent of a cell's mean from its baseline's mean, with an interval.

    The interval is the 95 % interval of the difference of two means (Welch). A single run has no
    spread, so then the difference is marked '(one seed)'.

    >>> _to_baseline([0.72, 0.74], [0.9, 0.92]), _to_baseline([0.72], [0.9, 0.92])
    ('-19.78 ± 6.69', '-20.88 (one seed)')
    """
    if not values or not baseline or not (reference := statistics.fmean(baseline)):
        return ""
    distance = f"{100 * (statistics.fmean(values) / reference - 1):+.2f}"
    if min(len(values), len(baseline)) < 2:
        return f"{distance} (one seed)"
    squares = [statistics.variance(each) / len(each) for each in (values, baseline)]
    if not (total := sum(squares)):
        return f"{distance} ± 0.00"
    freedom = total**2 / sum(
        square**2 / (len(each) - 1) for square, each in zip(squares, (values, baseline))
    )
    width = float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)
    return f"{distance} ± {100 * width / abs(reference):.2f}"


def average_batch(record: Record) -> float:
    """Returns a run's mean number of examples per update."""
    updates = record["updates"]
    # Older records have no example counts, because their batch was constant. A run that diverged at its
    # start has no updates.
    if not updates or "examples" not in record:
        return float(record["batch"])
    return float(record["examples"] / updates)


# Runs on one device send nothing, so their records have no `sent_bytes`.
_COLUMNS: dict[str, Callable[[Record], float | None]] = {
    "updates": lambda record: record["updates"],
    "average_batch": average_batch,
    "sent_bytes": lambda record: record.get("sent_bytes"),
}


def difference(summary: Summary, metric: Metric) -> str:
    """Formats the distance to the paper's value, such as '-0.0025 ± 0.0005' or '-0.0014 (one seed)'.

    The interval is that of the mean measured here; the error of the paper's value is unknown.
    """
    if summary.distance is None:
        return ""
    return f"{summary.distance:+.{metric.digits}f}{_noise(summary, metric) or ' (one seed)'}"


def measured(summary: Summary, metric: Metric) -> str:
    """Formats the mean with its interval, such as '0.9940 ± 0.0006'; '' if nothing is measured.

    If some runs diverged, gives their number: '3 of 5 at 0.9840; 2 diverged'.
    """
    return _mean(summary.values, metric) + _noise(summary, metric) if summary.values else ""


def _noise(summary: Summary, metric: Metric) -> str:
    return "" if summary.half_width is None else f" ± {summary.half_width:.{metric.digits}f}"
