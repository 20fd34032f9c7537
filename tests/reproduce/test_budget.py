"""Runs are estimated from records or from the table, and the most telling that fit are chosen."""

import pathlib

import jax
import pytest

from lamb_tpu.reproduce import budget
from lamb_tpu.reproduce.results import Results
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of

KIND = jax.devices()[0].device_kind


def test_estimate(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    job, results = job_of(table), Results(table)
    assert budget.estimate(job, results) is None
    said = write(tmp_path, TABLE.replace("seeds = 2", "minutes = {cpu = 2, tpu = 0.1}"))
    assert budget.estimate(job_of(said), results) == 120
    # Records of this kind of device are better than what the table says: of any cell, or its own.
    add(results, job_of(table, "adamw"), 0.9)
    (record,) = results
    record |= {"device": KIND, "seconds": 30.0}
    assert budget.estimate(job_of(said), results) == 30
    add(results, job_of(table, seed=1), 0.9)
    next(r for r in results if r["cell"] == "lamb").update(device=KIND, seconds=20.0)
    assert budget.estimate(job_of(said), results) == 20
    for record in results:
        record["device"] = "another"
    assert budget.estimate(job_of(said), results) == 120


@pytest.mark.parametrize(
    "minutes, names",
    [
        (1.9, []),
        (4.1, ["lamb0", "adamw0"]),
        (6.1, ["lamb0", "adamw0", "lamb1"]),
        (99, ["lamb0", "adamw0", "lamb1", "adamw1"]),
    ],
)
def test_fitting(tmp_path: pathlib.Path, minutes: float, names: list[str]) -> None:
    table = write(tmp_path, TABLE.replace("seeds = 2", "minutes = {cpu = 2}"))
    jobs = [job_of(table, cell, seed) for cell in ("lamb", "adamw") for seed in (0, 1)]
    found = budget.fitting(jobs, Results(table), 60 * minutes)
    assert [f"{job.cell.name}{job.seed}" for job in found] == names


def test_cells_with_a_published_value_come_first(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TABLE.replace(", published = {accuracy = 93.0}", ""))
    jobs = [job_of(table, cell) for cell in ("lamb", "adamw")]
    # Nothing is known of their time: the first is run alone.
    assert budget.fitting(jobs, Results(table), 1.0) == [jobs[1]]
    assert budget.fitting(jobs, Results(table), 0.0) == []
