"""The command `run`: trains what is missing or stale, within a time, and keeps what it measured."""

import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.files import locks
from lamb_tpu.reproduce import budget, carrying, engine, workers
from lamb_tpu.reproduce.choosing import choose_cells, choose_scale
from lamb_tpu.reproduce.engine import Finished, Place
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.showing import show_head, show_scale
from lamb_tpu.reproduce.tables import Cell, Scale, Table
from lamb_tpu.reproduce.tuning import tuned
from lamb_tpu.reproduce.watching import Watch
from lamb_tpu.store import checkout
from lamb_tpu.watch.progress import format_seconds

# With a budget the machine is lent: no more than this share of a run is lost with it.
_OFTEN = "2 percent"


class Request(NamedTuple):
    """Options of the command; see its --help. Times are in seconds."""

    scale: str | None
    cells: str | None
    seeds: int | None
    runs: pathlib.Path
    data: pathlib.Path | None
    processes: int
    time_limit: float | None
    dry_run: bool
    records: pathlib.Path | None
    tune: int | None = None
    budget: float | None = None
    carry: pathlib.Path | None = None


class Plan(NamedTuple):
    """Cells and seeds that are wanted of a table, and its records."""

    table: Table
    scale: Scale
    cells: Sequence[Cell]
    seeds: int
    results: Results

    def due(self) -> list[Job]:
        """Returns the runs that are missing or stale."""
        return engine.due(self.table, self.scale, self.cells, self.seeds, self.results)


def run(tables: Sequence[Table], request: Request) -> None:
    """Trains what is missing or stale in some tables, and keeps each record as it comes.

    Raises:
      UserError: an error in the request, a table or the data, found before anything is trained; or
        the records belong to the package and its code has uncommitted changes; or another process
        runs in the same folder.
    """
    plans = [_plan(table, request) for table in tables]
    check(plans, request)
    if request.dry_run:
        for plan in plans:
            _list_due(plan, request.budget)
        return
    commit = checkout.commit()
    for plan in plans:
        if (reason := plan.results.objection(commit)) and plan.due():
            raise UserError(reason)
    train(plans, request, _show)


def check(plans: Sequence[Plan], request: Request) -> None:
    """Makes every config, so that a mistake is told before the first run.

    Raises:
      UserError: a mistake in the request, a table or the data.
    """
    for key, value in (("--seeds", request.seeds), ("--processes", request.processes)):
        if value is not None and value < 1:
            raise UserError(f"{key} is {value}; it must be at least 1")
    numbers = {plan.scale.cpu_devices: plan.table.key for plan in plans}
    if len(numbers) > 1:
        (one, first), (other, second) = list(numbers.items())[:2]
        raise UserError(
            f"{first} needs {one} CPU device(s) and {second} {other}, and one command has one "
            "number of devices; run them one after the other"
        )
    for plan in plans:
        engine.check(
            [
                job
                for cell in plan.cells
                for job in (
                    engine.searches(plan.table, plan.scale, cell)
                    or [Job(plan.table, plan.scale, cell, 0)]
                )
            ],
            _place(request),
        )


def train(
    plans: Sequence[Plan],
    request: Request,
    show: Callable[[Table, Scale, Results], None],
    flag: str = "--runs",
) -> None:
    """Trains what is missing or stale, and keeps each record as it comes.

    Args:
      plans: what to train, in this order.
      request: where and how.
      show: called with the records of each table that is complete.
      flag: the option that gives `request.runs`, for messages.

    Raises:
      UserError: a run has a mistake, or another process runs in the same folder.
    """
    try:
        request.runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} {request.runs} cannot be written ({error.strerror}); give a folder that can"
        ) from None
    refusal = f"{flag} {request.runs} is in use by another process; wait until it ends, or give "
    with locks.hold(request.runs / ".lock", refusal + "another folder"):
        _train(plans, request, show)


def _place(request: Request) -> Place:
    return Place(request.runs, request.data, None if request.budget is None else _OFTEN)


def _plan(table: Table, request: Request) -> Plan:
    if request.tune is not None:
        table = tuned(table, request.tune)
    scale = choose_scale(table, request.scale, "small")
    cells = choose_cells(table, scale, request.cells)
    # Runs that only try out the commands leave no record in the checkout.
    records = request.records or (request.runs if scale.name == "smoke" else None)
    return Plan(table, scale, cells, request.seeds or scale.seeds, Results(table, records))


def _train(
    plans: Sequence[Plan], request: Request, show: Callable[[Table, Scale, Results], None]
) -> None:
    place = _place(request)
    began, over = time.monotonic(), threading.Event()
    limits = [limit for limit in (request.time_limit, request.budget) if limit is not None]

    def end() -> None:
        over.set()
        os.kill(os.getpid(), signal.SIGTERM)  # a run saves on it

    timer = threading.Timer(min(limits, default=0), end)
    timer.daemon = True
    if limits:
        timer.start()

    def choose(plan: Plan) -> list[Job]:
        if request.budget is None:
            return plan.due()
        left = request.budget - (time.monotonic() - began)
        return budget.fitting(plan.due(), plan.results, left)[: request.processes]

    def keep() -> None:
        if request.carry is not None:
            carrying.write(request.carry, [(plan.table, plan.results) for plan in plans])

    keep()  # a file that cannot be written is told before anything is trained
    try:
        with Watch(place, request.processes) as watch:
            for plan in plans:
                _train_plan(plan, choose, keep, watch, place, request.processes)
                show(plan.table, plan.scale, plan.results)
    except Preempted:
        if not over.is_set():
            raise
        limit = format_seconds(min(limits))
        print(f"the time limit of {limit} is reached; the same command goes on", flush=True)
    finally:
        timer.cancel()
    keep()
    if request.carry is not None:
        print(
            f"{request.carry} has the records; elsewhere: python -m lamb_tpu.reproduce adopt "
            f"{request.carry}"
        )
    print(f"{format_seconds(time.monotonic() - began)} in all", flush=True)


def _train_plan(
    plan: Plan,
    choose: Callable[[Plan], list[Job]],
    keep: Callable[[], None],
    watch: Watch,
    place: Place,
    processes: int,
) -> None:
    took: list[float] = []
    started: dict[tuple, float] = {}
    while jobs := choose(plan):
        count = len(took) + len(plan.due())

        def begun(job: Job) -> None:
            started[job.key] = time.monotonic()
            print(f"{plan.table.key}: run {len(started)} of {count}: {job.name}", flush=True)
            watch.begun(job)

        def done(finished: Finished) -> None:
            watch.done(finished.job)
            plan.results.add(finished.record, finished.configs)
            keep()
            took.append(time.monotonic() - started[finished.job.key])
            left = sum(took) / len(took) * (count - len(took)) / min(processes, count)
            print(
                _told(finished, took[-1])
                + (f"; {format_seconds(left)} left" if len(took) < count else ""),
                flush=True,
            )

        if processes > 1:
            workers.run_side_by_side(jobs, place, processes, begun, done)
        else:
            engine.run_one_by_one(jobs, place, begun, done)
    _tell_left_out(plan, len(plan.due()))


def _show(table: Table, scale: Scale, results: Results) -> None:
    print()
    show_head(table)
    show_scale(table, scale, results)


def _told(finished: Finished, took: float) -> str:
    metric, record = finished.job.scale.metric, finished.record
    text = (
        "diverged"
        if record["values"] is None
        else (f"{metric.key} {metric.factor * record['values'][metric.key]:.{metric.digits}f}")
    )
    return f"  {finished.job.name}: {text} in {format_seconds(took)}"


def _tell_left_out(plan: Plan, count: int) -> None:
    """Prints how many runs --budget left out, if any."""
    if count:
        print(
            f"{plan.table.key}: {count} more runs do not fit into --budget; a longer one, or "
            "none, takes them",
            flush=True,
        )


def _list_due(plan: Plan, seconds: float | None) -> None:
    due = jobs = plan.due()
    if seconds is not None:
        jobs = budget.fitting(due, plan.results, seconds)
    print(f"{plan.table.key}, {plan.scale.name}: {len(jobs)} runs to train")
    total = 0.0
    for job in jobs:
        estimate = budget.estimate(job, plan.results)
        total += estimate or 0.0
        print(f"  {job.name}" + (f"  about {format_seconds(estimate)}" if estimate else ""))
    if total:
        print(f"  about {format_seconds(total)} in all, one after another")
    if any(job.factor is not None for job in jobs):
        print("  then the runs that measure, with the values that these find best")
    _tell_left_out(plan, len(due) - len(jobs))
