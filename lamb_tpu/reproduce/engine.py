"""Trains the missing runs of a table, one after another or side by side.

Each run has a separate workdir, and resumes there if it was killed. The name of the workdir ends in the
hash of the config, so if the config changes, training starts from scratch.
"""

import contextlib
import dataclasses
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lamb_tpu.cluster import cpu_devices
from lamb_tpu.data.folders import folder_of
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import divergence
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import results as results_lib
from lamb_tpu.reproduce.jobs import Job, JobStage
from lamb_tpu.reproduce.results import Record, Results
from lamb_tpu.reproduce.tables import Cell, Scale, Table
from lamb_tpu.run import metric as metric_lib
from lamb_tpu.run import phases, together
from lamb_tpu.spec import Spec, flatten
from lamb_tpu.store import programs
from lamb_tpu.train import train, train_together
from lamb_tpu.watch.guards import Diverged

Flat = Sequence[Mapping[str, Any]]  # flattened configs of a job's stages


class Finished(NamedTuple):
    """A completed run: its job, its record, and the flattened configs of its stages."""

    job: Job
    record: Record
    configs: Flat


# Returns the next job, or the next jobs that share one program, and their `checkpoints`, see `execute`.
Take = Callable[[], tuple[Sequence[Job], str | None] | None]


class RunSetup(NamedTuple):
    """Folders of the runs and their data, and config overrides that change no result.

    Attributes:
      data: folder of the data sets' folders; None if data sets are downloaded.
      changed: overrides for every run; their keys are in `config.FREE_KEYS`.
    """

    runs: pathlib.Path
    data: pathlib.Path | None
    changed: Mapping[str, Any] = {}


def searches(table: Table, scale: Scale, cell: Cell) -> list[Job]:
    """Returns the runs of a cell's search; empty if the table has no search."""
    if table.tuning is None or cell.unknown:
        return []
    searched = table.cells[cell.tuned_by or cell.name]
    return [
        Job(table, scale, searched, seed, factor)
        for factor in table.tuning.factors
        for seed in range(table.tuning.seeds)
    ]


def search_means(jobs: Sequence[Job], results: Results) -> dict[float, float] | None:
    """Returns the mean metric at each factor of a search; None if a run of the search is missing.

    If a run at a factor diverged (see `divergence`), the mean at this factor is the infinity that ranks last.
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
            worst if divergence.value(record, metric) is None else record["values"][metric.key]
        )
    return {factor: statistics.fmean(numbers) for factor, numbers in values.items()}


def best_factor(jobs: Sequence[Job], results: Results) -> float | None:
    """Returns the factor with the best mean; None if a run of the search is missing."""
    means = search_means(jobs, results)
    if means is None:
        return None
    choose = max if jobs[0].scale.metric.better == "higher" else min
    return choose(means, key=lambda factor: means[factor])


def measurements(
    table: Table, scale: Scale, cell: Cell, seeds: int, results: Results
) -> list[Job] | None:
    """Returns the runs that measure a cell; None while its search is not complete."""
    if cell.unknown:
        return []
    has_search = table.tuning is not None
    chosen = best_factor(searches(table, scale, cell), results) if has_search else 1.0
    if chosen is None:
        return None
    return [Job(table, scale, cell, seed, chosen=chosen) for seed in range(seeds)]


def due(
    table: Table, scale: Scale, cells: Iterable[Cell], seeds: int, results: Results
) -> list[Job]:
    """Returns the missing and stale runs that can start now, ordered by seed and then by cell.

    A cell is measured only after its search, so searches come first.
    """
    jobs: dict[Any, Job] = {}  # cells may share a search
    for cell in cells:
        wanted = measurements(table, scale, cell, seeds, results)
        if wanted is None:
            wanted = searches(table, scale, cell)
        jobs |= {job.key: job for job in wanted if not results.holds(job)}
    # Train the first seed of every cell before any second seed.
    return sorted(jobs.values(), key=lambda job: job.seed)


def execute(job: Job, setup: RunSetup, checkpoints: str | None = None) -> Finished:
    """Trains or resumes a job, and returns its record.

    `checkpoints` is the duration between checkpoints, such as '2 percent'; None uses the value in
    `setup.changed` or else in the recipe.
    """
    configs, flat, folders = _prepared(job, setup, checkpoints)
    if job.scale.cpu_devices > 1:
        cpu_devices.ensure(job.scale.cpu_devices)
    diverged, before = None, None
    for number, (config, workdir) in enumerate(zip(configs, folders)):
        if before is not None:
            config = dataclasses.replace(config, init_from=str(before))
        before = workdir
        metric = _metric(job) if workdir == folders[-1] else None
        try:
            # Runs that differ only by seed share compiled programs.
            with programs.kept_in(setup.runs, every=True), _data_errors(job, number):
                train(config, workdir, label=job.name, quiet=True, metric=metric)
        except Diverged as error:
            diverged = error
            break
    return finished(job, config, workdir, flat, diverged)


def can_share(job: Job) -> bool:
    """Returns whether one program can train a job for several seeds together."""
    stages = jobs_lib.stages(job)
    return len(stages) == 1 and not together.reason_against(stages[0].config())


def execute_together(
    jobs: Sequence[Job], setup: RunSetup, checkpoints: str | None = None
) -> list[Finished]:
    """Trains, in one program, jobs that differ only by seed; see `can_share` and `execute`."""
    if len(jobs) == 1:
        return [execute(jobs[0], setup, checkpoints)]
    first, label = jobs[0], f"{jobs[0].name} and {len(jobs) - 1} more"
    made = [_prepared(job, setup, checkpoints) for job in jobs]
    configs, folders = [each[0][0] for each in made], [each[2][0] for each in made]
    if first.scale.cpu_devices > 1:
        cpu_devices.ensure(first.scale.cpu_devices)
    with programs.kept_in(setup.runs, every=True), _data_errors(first, 0):
        outcomes = train_together(configs, folders, label, quiet=True, metric=_metric(first))
    return [
        finished(job, config, folder, flat, result if isinstance(result, Diverged) else None)
        for job, ([config], flat, [folder]), result in zip(jobs, made, outcomes, strict=True)
    ]


def finished(
    job: Job, config: Spec, workdir: pathlib.Path, flat: Flat, diverged: Diverged | None = None
) -> Finished:
    """Returns the record of a run that has ended; `diverged` is the error if it ended early.

    `config` and `workdir` belong to the run's last stage; `flat` has the flattened configs of all stages.
    If a stage has phases, its workdir has a subfolder for each phase.
    """
    folder = workdir / max(config.phases, default="")
    reason = None if diverged is None else str(diverged).partition(";")[0]
    record = results_lib.of_run(job, folder, reason)
    return Finished(job, record | {"config": jobs_lib.config_hash(flat)}, flat)


def _metric(job: Job) -> str | None:
    """Returns the metric that evaluations must report; None for a training rate."""
    key = job.scale.metric.key
    return None if key == metric_lib.RATE else key


def workdirs(job: Job, setup: RunSetup) -> list[pathlib.Path]:
    """Returns the workdir of each stage of a job."""
    return _prepared(job, setup)[2]


def _prepared(
    job: Job, setup: RunSetup, checkpoints: str | None = None
) -> tuple[list[Spec], Flat, list[pathlib.Path]]:
    """Returns the configs of a job's stages, the flattened configs, and the workdirs."""
    every = {} if checkpoints is None else {"checkpoint.every": checkpoints}
    stages = jobs_lib.stages(job, setup.data, {**every, **setup.changed})
    configs = [stage.config() for stage in stages]
    flat = jobs_lib.flat_configs(configs)
    folder = setup.runs / job.table.key / f"{job.name}-{jobs_lib.config_hash(flat)}"
    return configs, flat, jobs_lib.stage_folders(folder, stages)


def check(jobs: Sequence[Job], setup: RunSetup) -> None:
    """Builds the config of every job, so that errors are reported before training."""
    seen = set()
    for job in jobs:
        if (job.scale.name, job.cell.name, job.factor) in seen:
            continue
        seen.add((job.scale.name, job.cell.name, job.factor))
        stages = jobs_lib.stages(job, setup.data, setup.changed)
        for name, stage in zip(job.scale.data[-len(stages) :], stages):
            config = stage.config()
            _check_data(job, name, config.data.name, stage, setup.data)
        # The metric is measured in the last phase of the last stage.
        last = phases.split(config)[-1].config
        if reason := metric_lib.unknown(flatten(last), job.scale.metric.key):
            problem, _, remedy = reason.partition("; ")
            key = f"{job.table.path}: metric.key"
            raise UserError(key, job.scale.metric.key, f"is a metric {problem}", remedy)


def _check_data(
    job: Job, name: str, data_name: str, stage: JobStage, data: pathlib.Path | None
) -> None:
    """Rejects a run whose data set is neither below --data nor downloaded.

    `name` is the folder of the stage's data set below --data; '' if the stage needs no folder.
    """
    folder = folder_of(data_name, f"DIR/{name}")
    downloaded = folder is None or folder.downloaded
    instructions = (
        f"run `python -m lamb_tpu.reproduce commands {job.table.key} --scale={job.scale.name}` to see "
        "what it must contain and how to create it"
    )
    if "smoke" in job.table.scales and job.scale.name != "smoke":
        instructions += ", or use --scale=smoke, which needs no data"
    if data is None:
        if name and not downloaded:
            raise UserError(
                "--data",
                problem=f"is missing: {job.table.key} at the scale {job.scale.name} reads "
                f"{data_name} from the folder {name} of --data=DIR",
                remedy=instructions,
            )
        return
    for value in stage.overrides.values():
        path = pathlib.Path(value if isinstance(value, str) else "")
        if path.is_relative_to(data) and not path.exists():
            raise UserError(
                "--data",
                str(data),
                f"has no {path.relative_to(data)}, which {job.table.key} needs at the scale "
                f"{job.scale.name}",
                "leave --data out to download it" if downloaded else instructions,
            )


@contextlib.contextmanager
def _data_errors(job: Job, stage: int) -> Iterator[None]:
    """Adds a hint about --data to errors about a data folder, because `run` cannot set the folder's key."""
    try:
        yield
    except UserError as error:
        names = job.scale.data[-len(job.cell.stages or job.scale.stages) :]
        if names[stage] and re.search(r"config\.data\.(dir|prepared_dir)\b", str(error)):
            option = f"(here: --data=DIR, which has that folder as DIR/{names[stage]})"
            remedy = f"{error.remedy} {option}".strip()
            raise UserError(error.key, error.value, error.problem, remedy) from error
        raise


def run_one_by_one(take: Take, setup: RunSetup, done: Callable[[Finished], None]) -> None:
    """Runs jobs in this process, until `take` returns None, and passes each finished run to `done`."""
    while (taken := take()) is not None:
        jobs, checkpoints = taken
        for finished in execute_together(jobs, setup, checkpoints):
            done(finished)
