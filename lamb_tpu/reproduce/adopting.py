"""Finds the cell of a finished run that was made elsewhere, such as on a pod or a GPU."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import carrying, engine
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import results as results_lib
from lamb_tpu.reproduce.engine import Finished
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store import runs
from lamb_tpu.store.workdir import Workdir


def take(tables: Mapping[str, Table], path: pathlib.Path) -> list[str]:
    """Takes a finished run, or a file of `run --carry`, to the records beside the tables.

    Args:
      tables: where to look.
      path: the workdir of the run, or the file.

    Returns:
      A line for each run that was taken; for a run on a TPU also one on the calibration of plans.

    Raises:
      UserError: see `find` and `carrying.take`.
    """
    if path.is_file():
        return carrying.take(path, tables)
    finished = find(tables, path)
    Results(finished.job.table).add(finished.record, finished.configs)
    lines = [f"{finished.job.table.key}: {finished.job.name}"]
    if finished.record["device"].startswith("TPU"):
        lines.append(
            "in a checkout, python -m experiments.plan --add=WORKDIR adds its speed to the "
            "calibration of plans"
        )
    return lines


def find(tables: Mapping[str, Table], workdir: pathlib.Path) -> Finished:
    """Returns the job that a workdir's run is, with its record.

    The run's config must be the job's in everything that changes what is computed, and the weights
    that it began with must be of a run of the job's stage before.

    Args:
      tables: where to look.
      workdir: the folder of a run, of its last stage if there are several.

    Raises:
      UserError: it holds no finished run, or one of another config; the message names the nearest
        cell and what differs.
    """
    chain = _chain(workdir)
    seed = chain[-1]["seed"]
    nearest: tuple[int, str, list[str]] | None = None
    for job in _candidates(tables, seed):
        stages = jobs_lib.stages(job)
        if len(stages) != len(chain):
            continue
        flat = jobs_lib.flat_configs([stage.config() for stage in stages])
        changed = jobs_lib.changes(chain, flat)
        if not changed:
            _check_complete(workdir)
            folder = workdir
            if phases := stages[-1].config().phases:
                folder = workdir / sorted(phases)[-1]
            record = results_lib.of_run(job, folder)
            return Finished(job, record | {"config": jobs_lib.config_hash(flat)}, flat)
        if nearest is None or len(changed) < nearest[0]:
            nearest = len(changed), f"{job.table.key}, {job.cell.name}-{job.scale.name}", changed
    if nearest is None:
        raise UserError(f"{workdir} is of no table: none has runs of {len(chain)} stages")
    raise UserError(
        f"{workdir} is of no table; the nearest is {nearest[1]}, from which it differs in "
        f"{'; '.join(nearest[2][:6])}"
    )


def _candidates(tables: Mapping[str, Table], seed: int) -> Iterator[Job]:
    for table in tables.values():
        results = Results(table)
        for scale in table.measured_scales():
            for cell in table.cells.values():
                jobs = engine.measurements(table, scale, cell, 1, results)
                yield from (job._replace(seed=seed) for job in jobs or ())


def _chain(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the configs of a run and of the runs whose weights it began with, the first first."""
    chain = [Workdir(workdir, "WORKDIR").read_config()]
    while (start := chain[0].get("init_from")) is not None:
        folder = pathlib.Path(start)
        # A copied tree keeps its stages side by side.
        beside = workdir.parent / folder.name
        places = (place for place in (folder, beside) if (place / "config.json").exists())
        found = next(places, None)
        if found is None or len(chain) > 8:
            raise UserError(
                f"{workdir} began with the weights of {start}, which is not there; copy that run "
                f"to {beside} so that its config can be checked"
            )
        chain.insert(0, Workdir(found, "WORKDIR").read_config())
    return chain


def _check_complete(workdir: pathlib.Path) -> None:
    config = Workdir(workdir, "WORKDIR").read_config()
    phases = {key.split(".")[1] for key in config if key.startswith("phases.")}
    run = runs.read(workdir / max(phases) if phases else workdir, "WORKDIR")
    if reason := run.unfinished():
        raise UserError(f"{workdir} holds a run that {reason}; let it finish")
