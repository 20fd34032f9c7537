"""The commands of `python -m lamb_tpu.reproduce`, each a function."""

import os
import pathlib
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.files import locks
from lamb_tpu.reproduce import adopting, engine, workers
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.engine import Finished, Place
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import matrix, measured, summaries
from lamb_tpu.reproduce.tables import SCALES, Cell, Scale, Table
from lamb_tpu.terminal import fit
from lamb_tpu.watch.progress import format_seconds


class Request(NamedTuple):
    """Options of the command `run`; see its --help."""

    scale: str | None
    cells: str | None
    seeds: int | None
    runs: pathlib.Path
    data: pathlib.Path | None
    processes: int
    time_limit: float | None
    dry_run: bool
    records: pathlib.Path | None


def show_list(tables: Mapping[str, Table]) -> None:
    """Prints each paper with its tables and how many of their cells are measured."""
    paper = None
    for table in tables.values():
        if table.paper != paper:
            paper = table.paper
            print(fit(f"{paper.title}" + (f" (arXiv:{paper.arxiv})" if paper.arxiv else "")))
        results = Results(table)
        counts = []
        for scale in table.measured_scales():
            found = summaries(table, scale, results)
            count = sum(bool(summary.values) for summary in found)
            counts.append(f"{count} of {len(found)} at the scale {scale.name}")
        print(fit(f"  {table.key}  {table.title}"))
        print(fit(f"    measured: {', '.join(counts)}"))


def show(tables: Sequence[Table], records: pathlib.Path | None) -> None:
    """Prints the cells of some tables: the paper's value, ours, and their distance.

    Args:
      tables: the tables.
      records: folder of records of one's own; None: those beside the tables.
    """
    for number, table in enumerate(tables):
        if number:
            print()
        print(fit(f"{table.key}: {table.title}"))
        where = ", ".join(filter(None, [
            table.paper.arxiv and f"arXiv:{table.paper.arxiv}", table.source,
        ]))
        if where:
            print(fit(where))
        if table.about:
            print(fit(" ".join(table.about.split())))
        results = Results(table, records)
        for scale in table.measured_scales():
            _show_scale(table, scale, results)


def _show_scale(table: Table, scale: Scale, results: Results) -> None:
    metric = scale.metric
    print()
    print(fit(f"{scale.name}: {metric.label} ({metric.better} is better)"
              + (f"; {' '.join(scale.about.split())}" if scale.about else "")))
    found = summaries(table, scale, results)
    if grid := matrix(found, metric):
        _print_columns(grid)
        if any(summary.published for summary in found):
            print("  In parentheses: the paper's.")
        print()
    rows = [("cell", "paper", "measured", "difference", "seeds", "")]
    notes = []
    for summary in found:
        known = f" ({summary.cell.known})" if summary.published else ""
        distance = summary.distance
        rows.append((
            summary.cell.name, summary.published + known, measured(summary, metric) or "-",
            "" if distance is None else f"{distance:+.{metric.digits}f}",
            str(len(summary.values) or ""), summary.status,
        ))
        if summary.search:
            notes.append(f"{summary.cell.name}: {summary.search}")
        count, changes = summary.stale
        if count:
            notes.append(f"{summary.cell.name}: {count} stale ({'; '.join(changes[:4])})")
    _print_columns(rows)
    for note in notes:
        print(fit(f"  {note}"))


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip())


def show_commands(tables: Sequence[Table], scale: str | None, cells: str | None) -> None:
    """Prints the commands that train each cell with seed 0."""
    for table in tables:
        size = _scale(table, scale, "paper")
        print(f"# {table.key}, {size.name}" + (f": {size.hardware}" if size.hardware else ""))
        if table.tuning is not None:
            print(f"# {table.tuning.key} is that of the recipe; `run` searches it first")
        for cell in _cells(table, size, cells):
            stages = jobs_lib.stages(Job(table, size, cell, 0))
            for stage in stages:
                stage.config()  # a command that is printed must be one that works
            workdir = f"runs/{table.key}/{cell.name}"
            folders = engine.stage_folders(pathlib.Path(workdir), stages)
            for number, (stage, folder) in enumerate(zip(stages, folders)):
                before = f" --config.init_from={folders[number - 1]}" if number else ""
                print(stage.command(str(folder)) + before)


def run(tables: Sequence[Table], request: Request) -> None:
    """Trains what is missing or stale in some tables, and keeps each record as it comes.

    Raises:
      UserError: a mistake in the request, a table or the data, found before anything is trained; or
        another process runs in the same folder.
    """
    for key, value in (("--seeds", request.seeds), ("--processes", request.processes)):
        if value is not None and value < 1:
            raise UserError(f"{key} is {value}; it must be at least 1")
    plans = []
    for table in tables:
        scale = _scale(table, request.scale, "small")
        plans.append((table, scale, _cells(table, scale, request.cells)))
    place = Place(request.runs, request.data)
    # Every config is made before the first run: a mistake is told at once.
    for table, scale, cells in plans:
        first = [job for cell in cells for job in (
            engine.searches(table, scale, cell) or [Job(table, scale, cell, 0)]
        )]
        engine.check(first, place)
    if request.dry_run:
        for table, scale, cells in plans:
            results = Results(table, request.records)
            jobs = engine.due(table, scale, cells, request.seeds or scale.seeds, results)
            _list_due(table, scale, jobs)
        return
    try:
        request.runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--runs {request.runs} cannot be written ({error.strerror}); give a folder that can"
        ) from None
    refusal = f"--runs {request.runs} is in use by another reproduce; wait until it ends, or give "
    with locks.hold(request.runs / ".lock", refusal + "another folder"):
        _run(plans, request, place)


def _run(
    plans: Sequence[tuple[Table, Scale, Sequence[Cell]]], request: Request, place: Place
) -> None:
    began, over = time.monotonic(), threading.Event()

    def end() -> None:
        over.set()
        os.kill(os.getpid(), signal.SIGTERM)  # a run saves on it

    timer = threading.Timer(request.time_limit or 0, end)
    timer.daemon = True
    if request.time_limit is not None:
        timer.start()
    try:
        for table, scale, cells in plans:
            _run_table(table, scale, cells, request, place)
    except Preempted:
        if not over.is_set():
            raise
        limit = format_seconds(request.time_limit or 0)
        print(f"the time limit of {limit} is reached; the same command goes on", flush=True)
    finally:
        timer.cancel()
    print(f"{format_seconds(time.monotonic() - began)} in all", flush=True)


def _run_table(
    table: Table, scale: Scale, cells: Sequence[Cell], request: Request, place: Place
) -> None:
    # Runs that only try out the commands leave no record in the checkout.
    records = request.records or (place.runs if scale.name == "smoke" else None)
    results, seeds = Results(table, records), request.seeds or scale.seeds
    while jobs := engine.due(table, scale, cells, seeds, results):
        count, took = len(jobs), list[float]()
        started: dict[tuple, float] = {}

        def begun(job: Job) -> None:
            started[job.key] = time.monotonic()
            print(f"{table.key}: run {len(started)} of {count}: {job.name}", flush=True)

        def done(finished: Finished) -> None:
            results.add(finished.record, finished.configs)
            took.append(time.monotonic() - started[finished.job.key])
            left = sum(took) / len(took) * (count - len(took)) / min(request.processes, count)
            print(_told(finished, took[-1])
                  + (f"; {format_seconds(left)} left" if len(took) < count else ""), flush=True)

        if request.processes > 1:
            workers.run_side_by_side(jobs, place, request.processes, begun, done)
        else:
            engine.run_one_by_one(jobs, place, begun, done)
    print()
    _show_scale(table, scale, results)


def _told(finished: Finished, took: float) -> str:
    metric, record = finished.job.scale.metric, finished.record
    text = "diverged" if record["values"] is None else (
        f"{metric.key} {metric.factor * record['values'][metric.key]:.{metric.digits}f}"
    )
    return f"  {finished.job.name}: {text} in {format_seconds(took)}"


def _list_due(table: Table, scale: Scale, jobs: Sequence[Job]) -> None:
    print(f"{table.key}, {scale.name}: {len(jobs)} runs to train")
    for job in jobs:
        print(f"  {job.name}")
    if any(job.factor is not None for job in jobs):
        print("  then the runs that measure, with the values that these find best")


def take_in(tables: Mapping[str, Table], workdir: pathlib.Path) -> None:
    """Takes a finished run made elsewhere into its cell."""
    finished = adopting.find(tables, workdir.expanduser())
    Results(finished.job.table).add(finished.record, finished.configs)
    print(f"{workdir} is {finished.job.table.key}, {finished.job.name}")


def report(
    tables: Mapping[str, Table], output: pathlib.Path, html: pathlib.Path | None,
    records: pathlib.Path | None,
) -> None:
    """Writes the pages of all that was measured."""
    from lamb_tpu.reproduce.report import site  # late: it brings Matplotlib

    site.write(tables, output, html, records)


def _scale(table: Table, name: str | None, default: str) -> Scale:
    if name is None:
        # A table that has only one size is run at that one.
        name = default if default in table.scales else next(iter(table.scales))
    if name not in table.scales:
        known = ", ".join(table.scales) if name in SCALES else ", ".join(SCALES)
        raise UserError(f"--scale is {name!r}; {table.key} has: {known}")
    return table.scales[name]


def _cells(table: Table, scale: Scale, names: str | None) -> list[Cell]:
    cells = {cell.name: cell for cell in engine.cells_at(table, scale.name) if not cell.unknown}
    if names is None:
        return list(cells.values())
    for name in names.split(","):
        if name not in cells:
            raise UserError(
                f"--cells has {name!r}; {table.key} at the scale {scale.name} has: "
                f"{', '.join(cells)}"
            )
    return [cells[name] for name in names.split(",")]
