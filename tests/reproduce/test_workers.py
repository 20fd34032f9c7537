"""Runs side by side end as runs one after another; a mistake in one ends all."""

import os
import pathlib

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine, workers
from lamb_tpu.reproduce.engine import Finished, Place
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, place, write


def jobs_of(table: Table) -> list[Job]:
    scale = table.scales["small"]
    return engine.due(table, scale, table.cells.values(), 2, Results(table))


@pytest.mark.long
def test_side_by_side(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    jobs, found, begun = jobs_of(table), list[Finished](), list[Job]()
    workers.run_side_by_side(jobs, place(tmp_path), 2, begun.append, found.append)
    assert begun == jobs and sorted(f.job.name for f in found) == sorted(j.name for j in jobs)
    one = next(f for f in found if f.job == jobs[0])
    alone = engine.execute(jobs[0], Place(tmp_path / "alone", None))
    for record in (one.record, alone.record):
        del record["seconds"], record["cores"]
    assert one.record == alone.record


@pytest.mark.long
def test_a_mistake_ends_all(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TABLE.replace('"accuracy", label', '"acuracy", label'))
    with pytest.raises(UserError, match=r"metric.key is 'acuracy', .* they have: accuracy, loss"):
        workers.run_side_by_side(
            jobs_of(table), place(tmp_path), 2, lambda job: None, lambda found: None
        )


def test_cores_are_shared() -> None:
    cores = os.sched_getaffinity(0)
    shares = workers._shares(len(cores))
    assert set().union(*shares) == cores and all(len(share) == 1 for share in shares)
    assert workers._shares(len(cores) + 1) == [set()] * (len(cores) + 1)
