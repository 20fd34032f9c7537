"""Times are estimated from records or the table; the most informative runs that fit are selected."""

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
    assert budget.estimate(job_of(said), results) == (120, 120, 120, 0)
    # Records from this type of device take precedence over the table's estimate: the records of the same
    # cell or, if there are none, those of any cell.
    add(results, job_of(table, "adamw"), 0.9)
    (record,) = results
    record |= {"device": KIND, "seconds": 30.0}
    assert budget.estimate(job_of(said), results) == (30, 30, 30, 1)
    add(results, job_of(table, seed=1), 0.9)
    next(r for r in results if r["cell"] == "lamb").update(device=KIND, seconds=20.0)
    assert budget.estimate(job_of(said), results) == (20, 20, 20, 1)
    # The time of a run that ended early is ignored.
    next(r for r in results if r["cell"] == "lamb")["values"] = None
    assert budget.estimate(job_of(said), results) == (1.5, 1.5, 1.5, 1)
    for record in results:
        record["device"] = "another"
    assert budget.estimate(job_of(said), results) == (120, 120, 120, 0)


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
    actual = budget.fitting(jobs, Results(table), 60 * minutes)
    assert [f"{job.cell.name}{job.seed}" for job in actual] == names


def test_cells_with_a_published_value_come_first(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TABLE.replace(", published = {accuracy = 93.0}", ""))
    jobs = [job_of(table, cell) for cell in ("lamb", "adamw")]
    # The time of these runs is unknown, so only the first run is started.
    assert budget.fitting(jobs, Results(table), 1.0) == [jobs[1]]
    assert budget.fitting(jobs, Results(table), 0.0) == []


@pytest.mark.parametrize(
    "seconds, every",
    [
        (None, None),
        (0.0, None),
        (10.0, "100 percent"),
        (60.0, "50 percent"),
        (1500.0, "2 percent"),
        (86400.0, "2 percent"),
    ],
)
def test_checkpoints_cost_less_than_they_protect(seconds: float | None, every: str | None) -> None:
    assert budget.checkpoints(seconds) == every
