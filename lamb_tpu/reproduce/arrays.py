"""Arrays of cluster jobs: each job trains a fixed share of the runs and writes separate records.

The share depends only on the job's index and the request, not on the records. So if the cluster's queue
restarts a job, the job has the same runs, and resumes the run that was interrupted.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu import limits
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.tables import Cell, Table

_FOLDER = r"index-\d+-of-\d+"
Unit = tuple[str, str, int | None]


class Index(NamedTuple):
    """One job of an array: its index from 0, and the number of jobs."""

    number: int
    count: int  # type: ignore[assignment]

    @property
    def folder(self) -> str:
        """Name of the job's folder in the folder of all records."""
        return f"index-{self.number}-of-{self.count}"


def parse(text: str) -> Index:
    """Parses the option --index.

    >>> parse("0/8")
    Index(number=0, count=8)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None or not int(match[1]) < int(match[2]) <= limits.MAX_RUNS:
        raise UserError(
            "--index",
            text,
            "is not INDEX/COUNT",
            f"use INDEX from 0 to COUNT - 1, and COUNT at most {limits.MAX_RUNS:,}, such as 0/8",
        )
    return Index(int(match[1]), int(match[2]))


def units(table: Table, cells: Sequence[Cell], seeds: int) -> list[Unit]:
    """Returns the units of a table: groups of runs that different machines can train independently.

    In a table without a search, a unit is one run. In a table with a search, a unit is a search and the
    measurements of all cells that use its result, because the measurements must wait for the search.
    """
    jobs = [
        Job(table, next(iter(table.scales.values())), cell, seed)
        for seed in range(seeds)
        for cell in cells
    ]
    return list(dict.fromkeys(map(unit_of, jobs)))


def unit_of(job: Job) -> Unit:
    """Returns the unit of a table to which a run belongs."""
    if job.table.tuning is not None:
        return job.table.key, job.cell.tuned_by or job.cell.name, None
    return job.table.key, job.cell.name, job.seed


def folders(records: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders that array jobs have created in a folder of records."""
    if buckets.is_remote(records):
        children = buckets.children(records)
    else:
        children = list(records.iterdir()) if records.is_dir() else []
    return sorted(path for path in children if re.fullmatch(_FOLDER, path.name, re.ASCII))
