"""Runs what a table asks for and nobody has measured yet, one run after another or side by side.

A run is a training run in a workdir of its own, so it resumes where it was killed. Its name ends in
the hash of its config: a config that has changed begins anew.
"""

import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lamb_tpu.cluster import cpu_devices
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import results as results_lib
from lamb_tpu.reproduce.jobs import Job, Stage
from lamb_tpu.reproduce.results import Record, Results
from lamb_tpu.reproduce.tables import Cell, Scale, Table
from lamb_tpu.store import programs
from lamb_tpu.train import train
from lamb_tpu.watch.guards import Diverged


class Finished(NamedTuple):
    """A run that is complete: its job, its record, and the flattened configs of its stages."""

    job: Job
    record: Record
    configs: Sequence[Mapping[str, Any]]


class Place(NamedTuple):
    """Folders of the runs and their data, and how often checkpoints are saved.

    Attributes:
      runs: folder of the workdirs.
      data: folder of the data sets' folders; None: they are downloaded.
      checkpoints: a duration between checkpoints, such as '2 percent'; None: the recipe's own.
    """

    runs: pathlib.Path
    data: pathlib.Path | None
    checkpoints: str | None = None


def searches(table: Table, scale: Scale, cell: Cell) -> list[Job]:
    """Returns the runs of a cell's search; none if the table has no search."""
    if table.tuning is None or cell.unknown:
        return []
    searched = table.cells[cell.tuned_by or cell.name]
    return [
        Job(table, scale, searched, seed, factor)
        for factor in table.tuning.factors
        for seed in range(table.tuning.seeds)
    ]


def search_means(jobs: Sequence[Job], results: Results) -> dict[float, float] | None:
    """Returns the mean of the metric at each factor of a search; None if a run of it is missing.

    A factor at which a run diverged has the worst of all means, an infinity.
    """
    values: dict[float, list[float]] = {}
    for job in jobs:
        record = results.of(job)
        if record is None or results.changes(job):
            return None
        metric = job.scale.metric
        worst = float("-inf") if metric.better == "higher" else float("inf")
        assert job.factor is not None
        values.setdefault(job.factor, []).append(
            worst if record["values"] is None else record["values"][metric.key]
        )
    return {factor: statistics.fmean(found) for factor, found in values.items()}


def best_factor(jobs: Sequence[Job], results: Results) -> float | None:
    """Returns the factor with the best mean of a search; None if a run of it is missing."""
    means = search_means(jobs, results)
    if means is None:
        return None
    choose = max if jobs[0].scale.metric.better == "higher" else min
    return choose(means, key=lambda factor: means[factor])


def measurements(
    table: Table, scale: Scale, cell: Cell, seeds: int, results: Results
) -> list[Job] | None:
    """Returns the runs that measure a cell; None while its search is not complete."""
    chosen: float | None = 1.0
    if cell.unknown:
        return []
    if table.tuning is not None:
        chosen = best_factor(searches(table, scale, cell), results)
    if chosen is None:
        return None
    return [Job(table, scale, cell, seed, None, chosen) for seed in range(seeds)]


def due(
    table: Table, scale: Scale, cells: Iterable[Cell], seeds: int, results: Results
) -> list[Job]:
    """Returns the runs that are missing or stale and can be run now, by seed and then by cell.

    The runs of a search come first: while it is not complete, its cell cannot be measured.
    """
    found: dict[Any, Job] = {}  # several cells may have one search
    for cell in cells:
        wanted = measurements(table, scale, cell, seeds, results)
        if wanted is None:
            wanted = searches(table, scale, cell)
        found |= {job.key: job for job in wanted if not results.holds(job)}
    # Every cell has its first seed before one has its second.
    return sorted(found.values(), key=lambda job: job.seed)


def execute(job: Job, place: Place) -> Finished:
    """Trains a job, or resumes it, and returns its record.

    Raises:
      UserError: a config, the data or a folder has a mistake.
      Preempted: SIGTERM or Ctrl-C arrived, and everything is saved.
    """
    configs = [stage.config() for stage in jobs_lib.stages(job, place.data)]
    flat = jobs_lib.flat_configs(configs)
    folders = workdirs(job, place)
    if job.scale.cpu_devices > 1:
        cpu_devices.ensure(job.scale.cpu_devices)
    diverged = None
    for number, (config, workdir) in enumerate(zip(configs, folders)):
        if place.checkpoints is not None:
            with config.unlocked():
                config.checkpoint.every = place.checkpoints
        if number:
            with config.unlocked():
                config.init_from = str(folders[number - 1])
        try:
            # Runs that differ in the seed alone need the same programs.
            with programs.kept_in(place.runs, every=True):
                train(config, workdir, label=job.name, quiet=True)
        except Diverged as error:
            diverged = str(error).partition(";")[0]
            break
    last = folders[number]
    if configs[number].phases:
        last /= sorted(configs[number].phases)[-1]
    record = results_lib.of_run(job, last, diverged)
    return Finished(job, record | {"config": jobs_lib.config_hash(flat)}, flat)


def workdirs(job: Job, place: Place) -> list[pathlib.Path]:
    """Returns the workdir of each stage of a job."""
    stages = jobs_lib.stages(job, place.data)
    digest = jobs_lib.config_hash(jobs_lib.flat_configs([stage.config() for stage in stages]))
    return stage_folders(place.runs / job.table.key / f"{job.name}-{digest}", stages)


def stage_folders(folder: pathlib.Path, stages: Sequence[Stage]) -> list[pathlib.Path]:
    """Returns the workdir of each stage of a run."""
    if len(stages) == 1:
        return [folder]
    return [folder / f"stage_{number}" for number in range(1, len(stages) + 1)]


def check(jobs: Sequence[Job], place: Place) -> None:
    """Makes the config of every job, so that a mistake is told before anything is trained.

    Raises:
      UserError: a config has a mistake, or a file or folder of data is missing.
    """
    seen = set()
    for job in jobs:
        if (job.scale.name, job.cell.name, job.factor) in seen:
            continue
        seen.add((job.scale.name, job.cell.name, job.factor))
        for stage in jobs_lib.stages(job, place.data):
            stage.config()
            for value in stage.overrides.values():
                if place.data is None or not isinstance(value, str):
                    continue
                path = pathlib.Path(value)
                if path.is_relative_to(place.data) and not path.exists():
                    raise UserError(
                        f"--data {place.data} has no {path.relative_to(place.data)}, which "
                        f"{job.table.key} needs at the scale {job.scale.name}; leave --data out "
                        "where the data set can be downloaded"
                    )


def run_one_by_one(
    jobs: Sequence[Job],
    place: Place,
    begun: Callable[[Job], None],
    done: Callable[[Finished], None],
) -> None:
    """Runs jobs in this process.

    Args:
      jobs: in the order in which they run.
      place: the folders.
      begun: called before each run.
      done: called after each run, to keep its record.
    """
    for job in jobs:
        begun(job)
        done(execute(job, place))
