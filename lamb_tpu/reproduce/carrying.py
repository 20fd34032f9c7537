"""Carries the records of several tables from one machine to another, as one file."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.files import reading, writing
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import tuning
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results, damage
from lamb_tpu.reproduce.tables import Table


def write(path: pathlib.Path, measured: Sequence[tuple[Table, Results]]) -> None:
    """Writes all records of some tables into one file, in place of what was there."""
    content = [
        {
            "table": table.key,
            "form": table.form,
            "runs": [{"record": record, "configs": results.config(record)} for record in results],
        }
        for table, results in measured
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writing.replace(path, json.dumps(content) + "\n")
    except OSError as error:
        raise UserError(
            f"--carry {path} cannot be written ({error.strerror}); give another file"
        ) from None


def take(path: pathlib.Path, tables: Mapping[str, Table]) -> list[str]:
    """Takes the records of a file that `write` made to those beside the tables.

    Records whose config is no longer the table's are left out, and those of uncommitted code.

    Args:
      path: the file.
      tables: where they belong.

    Returns:
      A line for each run that was taken.

    Raises:
      UserError: the file is damaged, and nothing was taken; or some records were left out.
    """
    try:
        parts = [
            (part["table"], part["form"], [(run["record"], run["configs"]) for run in part["runs"]])
            for part in reading.read_json(path)
        ]
        for reason in (damage(record) for _, _, runs in parts for record, _ in runs):
            if reason:
                raise ValueError(f"a record {reason}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is neither a workdir nor a file of `run --carry` ({error})"
        ) from None
    told, refused = [], []
    for key, form, runs in parts:
        if key not in tables:
            refused += [f"there is no table {key!r}"] * len(runs)
            continue
        table = tables[key]
        if form:
            factors = {record["factor"] for record, _ in runs} - {None}
            table = tuning.tuned(table, max(2, len(factors)))
        results = Results(table)
        for record, configs in runs:
            job = _job(table, record)
            name = f"{key}: {record['cell']}-{record['scale']}, seed {record['seed']}"
            if job is None:
                refused.append(f"{name}: there is no such cell")
                continue
            flat = jobs_lib.flat_configs([stage.config() for stage in jobs_lib.stages(job)])
            if changed := jobs_lib.changes(configs, flat):
                refused.append(f"{name}: {'; '.join(changed[:3])}")
                continue
            if reason := results.objection(record["commit"]):
                refused.append(f"{name}: {reason}")
                continue
            results.add(record, configs)
            told.append(f"{key}: {job.name}")
    if refused:
        raise UserError(
            f"{path}: {len(told)} records were taken, {len(refused)} were not, because their "
            f"config is not the table's or their code was not committed: {refused[0]}"
        )
    return told


def _job(table: Table, record: Mapping[str, Any]) -> Job | None:
    """Returns the job of a record; None if the table has no such cell or scale."""
    scale, cell = table.scales.get(record["scale"]), table.cells.get(record["cell"])
    if scale is None or cell is None:
        return None
    return Job(table, scale, cell, record["seed"], record["factor"], record.get("chosen") or 1.0)
