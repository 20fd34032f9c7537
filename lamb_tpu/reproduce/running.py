"""The command `run`: trains missing and stale runs within a time limit and records the results."""

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from lamb_tpu import terminal
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.files import buckets, locks, writing
from lamb_tpu.limits import MAX_TOGETHER
from lamb_tpu.reproduce import arrays, budget, carrying, divergence, engine, timing, workers
from lamb_tpu.reproduce.arrays import Index
from lamb_tpu.reproduce.choosing import choose_cells, choose_scale
from lamb_tpu.reproduce.engine import Finished, RunSetup
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.showing import show_head, show_scale
from lamb_tpu.reproduce.tables import Cell, Scale, Table, check_runs
from lamb_tpu.reproduce.tuning import tuned
from lamb_tpu.reproduce.watching import Watch
from lamb_tpu.store import checkout
from lamb_tpu.watch.progress import format_seconds


class TableRequest(NamedTuple):
    """Options of the command `run`, see its --help. Times are in seconds."""

    runs: pathlib.Path
    scale: str | None = None
    cells: str | None = None
    seeds: int | None = None
    data: pathlib.Path | None = None
    processes: int = 1
    time_limit: float | None = None
    dry_run: bool = False
    records: pathlib.Path | None = None
    tune: int | None = None
    budget: float | None = None
    carry: pathlib.Path | None = None
    index: Index | None = None  # type: ignore[assignment]
    changed: Mapping[str, Any] = {}
    together: bool = False

    @property
    def setup(self) -> RunSetup:
        """Folders of the runs, and overrides that change no result."""
        return RunSetup(self.runs, self.data, self.changed)


class TablePlan(NamedTuple):
    """The requested cells and seeds of a table, and the table's records.

    Attributes:
      share: units that this job of an array trains; None: all units.
      others: records of other array jobs in the same folder; their runs are not repeated.
    """

    table: Table
    scale: Scale
    cells: Sequence[Cell]
    seeds: int
    results: Results
    share: AbstractSet[arrays.Unit] | None = None
    others: Sequence[Results] = ()

    def due(self) -> list[Job]:
        """Returns the missing and stale runs."""
        jobs = engine.due(self.table, self.scale, self.cells, self.seeds, self.results)
        if self.share is None:
            return jobs
        return [job for job in jobs if arrays.unit_of(job) in self.share]

    def missing(self) -> list[Job]:
        """Returns the due runs that no other job of an array has trained."""
        return [job for job in self.due() if not any(each.holds(job) for each in self.others)]

    def gather(self) -> None:
        """Adds the records of due runs that other jobs of an array have trained."""
        for other in self.others:
            other.warn()
        count = 0
        # Measurements become due when the last run of their search has been added.
        while runs := [
            (each, job) for job in self.due() for each in self.others if each.holds(job)
        ]:
            for other, job in runs:
                if not self.results.holds(job):  # False if two jobs trained the same run
                    record = other.of(job)
                    assert record is not None  # implied by `holds`
                    self.results.add(record, other.config(record))
                    count += 1
        if count:
            print(f"{self.table.key}: {count} records of array jobs added", flush=True)


# Maps a plan and the keys of started runs to the next jobs, which share one program, and to the
# duration between their checkpoints; None if no job is left.
Choose = Callable[[TablePlan, Container[tuple]], tuple[Sequence[Job], str | None] | None]


def run(tables: Sequence[Table], request: TableRequest) -> None:
    """Trains the missing and stale runs of tables; reports any error before the first run."""
    plans = share_out([_plan(table, request) for table in tables], request.index)
    check(plans, request)
    if request.dry_run:
        for plan in plans:
            _list_due(plan, request.budget)
        return
    if request.records is not None and buckets.is_remote(request.records):
        buckets.check(request.records, "--records")
    for plan in plans:
        plan.gather()
    for plan in plans:
        if plan.due():
            plan.results.check_writable(checkout.commit())
    if request.index is None:
        train(plans, request, _show)
        return
    train(plans, request, lambda *_: None)
    print(
        f"the records of index {request.index.number} are complete; once all indices are, run "
        f"python -m lamb_tpu.reproduce adopt {request.records or request.runs}",
        flush=True,
    )


def share_out(plans: Sequence[TablePlan], index: Index | None) -> list[TablePlan]:
    """Restricts plans to the runs of one array job; if no index is given, returns the plans unchanged."""
    if index is None:
        return list(plans)
    units = [unit for plan in plans for unit in arrays.units(plan.table, plan.cells, plan.seeds)]
    share = set(units[index.number :: index.count])
    return [plan._replace(share=share) for plan in plans]


def records_of(
    table: Table, folder: pathlib.Path | None, index: Index | None, target: pathlib.Path | None
) -> tuple[Results, list[Results]]:
    """Returns the records that a job extends, and the records of other array jobs in `folder`.

    Without an index, the job extends the records in the folder `target`, see `Results`.
    """
    others = [] if folder is None else arrays.folders(folder)
    if index is not None:
        assert folder is not None  # checked before
        target = folder / index.folder
    return Results(table, target), [Results(table, each) for each in others if each != target]


def check(plans: Sequence[TablePlan], request: TableRequest) -> None:
    """Builds every config, so that errors are reported before the first run."""
    if request.carry is not None:
        writing.check_target(request.carry, "--carry", parents=True)
    numbers = {plan.scale.cpu_devices: plan.table.key for plan in plans}
    if len(numbers) > 1:
        (num_first, first), (num_second, second) = list(numbers.items())[:2]
        raise UserError(
            f"{first} and {second}",
            problem=f"need {num_first} and {num_second} CPU devices, but the tables of one command must "
            "use the same number",
            remedy="run these tables in separate commands",
        )
    for table, scale, cells, *_ in plans:
        jobs = [
            job
            for cell in cells
            for job in engine.searches(table, scale, cell) or [Job(table, scale, cell, 0)]
        ]
        engine.check(jobs, request.setup)


def train(
    plans: Sequence[TablePlan],
    request: TableRequest,
    show: Callable[[Table, Scale, Results], None],
    flag: str = "--runs",
) -> None:
    """Trains missing and stale runs, and calls `show` with the records of each completed table.

    Each record is saved when its run ends. For messages, `flag` is the option that sets `request.runs`.
    """
    with _locked(request, flag), terminal.lasting():
        _train(plans, request, show)


@contextlib.contextmanager
def _locked(request: TableRequest, flag: str) -> Iterator[None]:
    """Creates the folder of the workdirs and locks it against a second process."""
    if buckets.is_remote(request.runs):  # each workdir there has a lock
        buckets.check(request.runs, flag)
        yield
        return
    try:
        request.runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} {request.runs}",
            problem=f"cannot be written ({error.strerror})",
            remedy="give another folder",
        ) from None
    # Jobs of one array train different runs, so they may share the folder.
    name = ".lock" if request.index is None else f".lock-{request.index.folder}"
    problem, remedy = "is in use by another process", "wait until it ends, or give another folder"
    busy = UserError(f"{flag} {request.runs}", ..., problem, remedy)
    with locks.hold(request.runs / name, busy):
        yield


def _plan(table: Table, request: TableRequest) -> TablePlan:
    if request.tune is not None:
        table = tuned(table, request.tune)
    scale = choose_scale(table, request.scale, "small")
    cells = choose_cells(table, request.cells)
    # Smoke runs only test the commands, so they leave no record in the checkout.
    records = request.records or (request.runs if scale.name == "smoke" else None)
    seeds = request.seeds or scale.seeds
    check_runs(table.key, cells, seeds, table.tuning)
    if request.index is not None and records is None:
        raise UserError(
            "--records",
            problem="is missing: each job of an array stores its records in a subfolder of it",
            remedy="give --records=FOLDER or --records=gs://BUCKET/FOLDER",
        )
    results, others = records_of(table, records, request.index, records)
    results.check()
    return TablePlan(table, scale, cells, seeds, results=results, others=others)


def _train(
    plans: Sequence[TablePlan], request: TableRequest, show: Callable[[Table, Scale, Results], None]
) -> None:
    setup = request.setup
    began, timed_out = time.monotonic(), threading.Event()
    limits = [limit for limit in (request.time_limit, request.budget) if limit is not None]

    def stop() -> None:
        timed_out.set()
        os.kill(os.getpid(), signal.SIGTERM)  # makes a run save and exit

    timer = threading.Timer(min(limits, default=0), stop)
    timer.daemon = True
    if limits:
        timer.start()

    def group(due: Sequence[Job]) -> Sequence[Job]:
        if not request.together or not engine.can_share(due[0]):
            return due[:1]
        return [job for job in due if job._replace(seed=due[0].seed) == due[0]][:MAX_TOGETHER]

    def choose(
        plan: TablePlan, started: Container[tuple]
    ) -> tuple[Sequence[Job], str | None] | None:
        due = [job for job in plan.due() if job.key not in started]
        if request.budget is None:
            return (group(due), None) if due else None
        left = request.budget - (time.monotonic() - began)
        if not (fitting := budget.fitting(due, plan.results, left)):
            return None
        needed = budget.estimate(fitting[0], plan.results)
        return group(fitting), budget.checkpoints(None if needed is None else needed.median)

    def save() -> None:
        if request.carry is not None:
            carrying.write(request.carry, [(plan.table, plan.results) for plan in plans])

    save()  # before training starts, report a file that cannot be written
    try:
        with Watch(setup, request.processes) as watch:
            for plan in plans:
                _train_plan(plan, choose, save, watch, setup, request.processes)
                show(plan.table, plan.scale, plan.results)
    except Preempted:
        if not timed_out.is_set():
            raise
        limit = format_seconds(min(limits))
        print(f"reached the time limit of {limit}; repeat the command to continue", flush=True)
    finally:
        timer.cancel()
    save()
    if request.carry is not None:
        print(
            f"{request.carry} has the records; on another machine, add them with "
            f"python -m lamb_tpu.reproduce adopt {request.carry}"
        )
    print(f"{format_seconds(time.monotonic() - began)} in all", flush=True)


def _train_plan(
    plan: TablePlan,
    choose: Choose,
    save: Callable[[], None],
    watch: Watch,
    setup: RunSetup,
    processes: int,
) -> None:
    durations: list[float] = []
    started: dict[tuple, tuple[float, int]] = {}  # start time, and number of runs in the program

    def take() -> tuple[Sequence[Job], str | None] | None:
        if (chosen := choose(plan, started)) is None:
            return None
        count = len(durations) + len(plan.due())
        for job in chosen[0]:
            started[job.key] = time.monotonic(), len(chosen[0])
            print(f"{plan.table.key}: run {len(started)} of {count}: {job.name}", flush=True)
            watch.begun(job)
        return chosen

    def done(finished: Finished) -> None:
        watch.done(finished.job)
        plan.results.add(finished.record, finished.configs)
        save()
        began, together = started[finished.job.key]
        durations.append((time.monotonic() - began) / together)
        count = len(durations) + len(plan.due())
        left = sum(durations) / len(durations) * (count - len(durations)) / min(processes, count)
        print(
            _result_line(finished, durations[-1])
            + (f"; {format_seconds(left)} left" if len(durations) < count else ""),
            flush=True,
        )

    # After a search, more runs may be due than the search had.
    max_runs = max(len(plan.due()), plan.seeds * len(plan.cells))
    if processes > 1:
        workers.run_side_by_side(take, setup, min(processes, max_runs), done)
    else:
        engine.run_one_by_one(take, setup, done)
    _print_left_out(plan, len(plan.due()))


def _show(table: Table, scale: Scale, results: Results) -> None:
    print()
    show_head(table)
    show_scale(table, scale, results)


def _result_line(finished: Finished, took: float) -> str:
    metric, record = finished.job.scale.metric, finished.record
    text = divergence.text(record, metric)
    if record["values"] is not None:
        text = f"{metric.key} {text}"
    return f"  {finished.job.name}: {text} in {format_seconds(took)}"


def _print_left_out(plan: TablePlan, count: int) -> None:
    if count:
        print(
            f"{plan.table.key}: {count} more runs do not fit into --budget; use a longer "
            "--budget, or none",
            flush=True,
        )


def _list_due(plan: TablePlan, seconds: float | None) -> None:
    due = jobs = plan.missing()
    if seconds is not None:
        jobs = budget.fitting(due, plan.results, seconds)
    print(f"{plan.table.key}, {plan.scale.name}: {len(jobs)} runs to train")
    total = 0.0
    for job in jobs:
        estimate = budget.estimate(job, plan.results)
        total += estimate.median if estimate else 0.0
        print(f"  {job.name}" + (f"  {timing.text(estimate)}" if estimate else ""))
    if total:
        print(f"  about {format_seconds(total)} in all, one after another")
    if any(job.factor is not None for job in jobs):
        print("  then the measurements, with the best values of these searches")
    _print_left_out(plan, len(due) - len(jobs))
