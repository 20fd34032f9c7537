"""Transfers records of several tables between machines, as a file or a folder."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.reproduce import arrays, tuning
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce import records as records_lib
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.records import Configs, Record
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table


def write(path: pathlib.Path, measured: Sequence[tuple[Table, Results]]) -> None:
    """Writes all records of some tables into one file, replacing the file's content."""
    content = [
        {
            "table": table.key,
            "form": table.form,
            "runs": [{"record": record, "configs": results.config(record)} for record in results],
        }
        for table, results in measured
    ]
    with writing.checked(path, "--carry"):
        path.parent.mkdir(parents=True, exist_ok=True)
    writing.replace(path, json.dumps(content) + "\n", "--carry")


def take(path: pathlib.Path, tables: Mapping[str, Table]) -> list[str]:
    """Adds the records in a file made by `write` to the tables' records; returns a line per record."""
    return _take(path, records_lib.read_carried(path), tables)


def take_folder(folder: pathlib.Path, tables: Mapping[str, Table]) -> list[str] | None:
    """Adds the records in a folder made by `run --records`, including those of array jobs; see `take`.

    Returns None if the folder has no records of these tables.
    """
    groups: list[_Group] = []
    folders = [folder, *arrays.folders(folder)]
    for table in tables.values():
        # The 2 is arbitrary: the file name of the tuned form does not depend on the number of values.
        for form in [table] if table.tuning else [table, tuning.tuned(table, 2)]:
            runs: dict[Any, tuple[Record, Configs]] = {}
            for results in (Results(form, each) for each in folders):
                results.check()
                for record in results:
                    runs[records_lib.key_of(record)] = record, results.config(record)
            if runs:
                groups.append((table.key, form.form, list(runs.values())))
    return _take(folder, groups, tables) if groups else None


_Group = tuple[str, str, list[tuple[Record, Configs]]]


def _take(path: pathlib.Path, groups: Sequence[_Group], tables: Mapping[str, Table]) -> list[str]:
    taken: list[tuple[Results, Job, Record, Configs]] = []
    rejected: list[str] = []
    for key, form, runs in groups:
        if key not in tables:
            rejected += [f"there is no table {key!r}"] * len(runs)
            continue
        table = tables[key]
        if form:
            factors = {record["factor"] for record, _ in runs} - {None}
            table = tuning.tuned(table, max(2, len(factors)))
        results = Results(table)
        results.check()
        for record, configs in runs:
            job = _job(table, record)
            name = f"{key}: {record['cell']}-{record['scale']}, seed {record['seed']}"
            if job is None:
                rejected.append(f"{name}: there is no such cell")
                continue
            flat = jobs_lib.flat_configs([stage.config() for stage in jobs_lib.stages(job)])
            if changed := jobs_lib.changes(configs, flat):
                rejected.append(f"{name}: {'; '.join(changed[:3])}")
            elif error := results.objection(record["commit"]):
                rejected.append(f"{name}: {error}")
            else:
                taken.append((results, job, record, configs))
    # Add the records last, so that an error in one table leaves all others unchanged.
    for results, _, record, configs in taken:
        results.add(record, configs)
    lines = [f"{job.table.key}: {job.name}" for _, job, _, _ in taken]
    if rejected:
        raise UserError(
            path,
            problem=f": {len(lines)} record(s) were added, but {len(rejected)} were rejected, such as "
            f"{rejected[0]}; train rejected runs again with the table's config and committed code",
        )
    return lines


def _job(table: Table, record: Mapping[str, Any]) -> Job | None:
    """Returns the job of a record; None if the table has no such cell or scale."""
    scale, cell = table.scales.get(record["scale"]), table.cells.get(record["cell"])
    if scale is None or cell is None:
        return None
    chosen = record.get("chosen") or 1.0
    return Job(table, scale, cell, record["seed"], record["factor"], chosen)
