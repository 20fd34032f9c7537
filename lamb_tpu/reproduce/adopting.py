"""Adds finished runs from other machines, such as a pod or a GPU, to the records of their cells."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import carrying, engine
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.engine import Finished
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store import runs
from lamb_tpu.store.workdir import Workdir

_LONGEST = 9  # runs in a chain of initial weights; a chain that returns to a run would never end


def take(tables: Mapping[str, Table], path: pathlib.Path) -> list[str]:
    """Adds a finished run, or records from another machine, to the records beside the tables.

    Args:
      tables: the tables to search.
      path: the workdir of the run, a file of `run --carry`, or a folder of `run --records`.

    Returns:
      A line for each run that was added. For a run on a TPU, another line explains how to add its
      speed to the calibration of plans.

    Raises:
      UserError: `path` has no finished run or records, no cell has the run's config, or records are damaged.
    """
    if path.is_file():
        return carrying.take(path, tables)
    if path.is_dir() and not (path / "config.json").exists():
        if (lines := carrying.take_folder(path, tables)) is not None:
            return lines
    finished = find(tables, path)
    Results(finished.job.table).add(finished.record, finished.configs)
    lines = [f"{finished.job.table.key}: {finished.job.name}"]
    if finished.record["device"].startswith("TPU"):
        lines.append(
            "in a checkout, python -m experiments.plan --add=WORKDIR adds the run's speed to the "
            "calibration of plans"
        )
    return lines


def find(tables: Mapping[str, Table], workdir: pathlib.Path) -> Finished:
    """Returns the job that the run in a workdir has measured, with the run's record.

    The run's config must equal the job's in every key that affects the result, and the run's initial
    weights must come from a run of the job's previous stage. `workdir` is that of the run's last stage.
    If no job matches, raises a UserError that names the nearest cell and the differences.
    """
    chain = _chain(workdir)
    seed = chain[-1]["seed"]
    nearest: tuple[int, str, list[str]] | None = None
    for job in _candidates(tables, seed):
        stages = jobs_lib.stages(job)
        if len(stages) != len(chain):
            continue
        configs = [stage.config() for stage in stages]
        flat = jobs_lib.flat_configs(configs)
        changed = jobs_lib.changes(chain, flat)
        if not changed:
            _check_complete(workdir)
            return engine.finished(job, configs[-1], workdir, flat)
        if nearest is None or len(changed) < nearest[0]:
            nearest = len(changed), f"{job.cell.name}-{job.scale.name} of {job.table.key}", changed
    if nearest is None:
        raise UserError(
            workdir,
            problem=f"matches no table: no table has runs of {len(chain)} stage(s)",
            remedy="give the workdir of a table's run",
        )
    raise UserError(
        workdir,
        problem=f"matches no table: the nearest cell, {nearest[1]}, has another config ('there' is "
        f"this run, 'now' is the table): {'; '.join(nearest[2][:6])}",
        remedy="give a run whose config is that of a cell",
    )


def _candidates(tables: Mapping[str, Table], seed: int) -> Iterator[Job]:
    for table in tables.values():
        results = Results(table)
        for scale in table.measured_scales():
            for cell in table.cells.values():
                jobs = engine.measurements(table, scale, cell, 1, results)
                yield from (job._replace(seed=seed) for job in jobs or ())


def _chain(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the configs of a run and of the runs that gave its initial weights, oldest first."""
    chain = [Workdir(workdir, "WORKDIR").read_config()]
    while (start := chain[0].get("init_from")) is not None:
        folder = pathlib.Path(start)
        # If a run was copied, the folders of its stages are still side by side.
        sibling = workdir.parent / folder.name
        candidates = (each for each in (folder, sibling) if (each / "config.json").exists())
        previous = next(candidates, None)
        if len(chain) > _LONGEST:
            problem = f"continues more than {_LONGEST} runs by config.init_from"
            raise UserError(workdir, problem=problem, remedy="adopt a run with fewer earlier runs")
        if previous is None:
            raise UserError(
                workdir,
                problem=f"began with the weights of {start}, which does not exist",
                remedy=f"copy that run to {sibling} so that its config can be checked",
            )
        chain.insert(0, Workdir(previous, "WORKDIR").read_config())
    return chain


def _check_complete(workdir: pathlib.Path) -> None:
    config = Workdir(workdir, "WORKDIR").read_config()
    phases = {key.split(".")[1] for key in config if key.startswith("phases.")}
    run = runs.read(workdir / max(phases) if phases else workdir, "WORKDIR")
    if reason := run.unfinished():
        raise UserError(workdir, problem=f"holds a run that {reason}", remedy="let the run finish")
