"""Arrays of jobs: disjoint and complete shares, gathered records, killed jobs."""

import json
import pathlib
import random
import signal
import subprocess
import time
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.reproduce import arrays, engine, running
from lamb_tpu.reproduce.arrays import Index
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.reproduce.tuning import tuned
from tests import gcs, tiny
from tests.raising import rejected
from tests.reproduce.papers import TABLE, TUNED, write
from tests.reproduce.test_results import add, job_of
from tests.reproduce.test_running import call, start

# Fields of a record that depend on machine and time.
_OF_THE_RUN = ("seconds",)


def plan(table: Table, results: Results, seeds: int = 3) -> running.TablePlan:
    cells = [cell for cell in table.cells.values() if not cell.unknown]
    return running.TablePlan(table, table.scales["small"], cells, seeds, results)


def due(plans: list[running.TablePlan]) -> list[tuple[str, str]]:
    return [(each.table.key, job.name) for each in plans for job in each.due()]


def plain(results: Results) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in _OF_THE_RUN}
        for record in results
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_shares_are_disjoint_and_complete(tmp_path: pathlib.Path, count: int) -> None:
    one, two = (write(tmp_path, name=name) for name in ("a", "b"))
    plans = [plan(one, Results(one, tmp_path)), plan(two, Results(two, tmp_path), seeds=1)]
    wanted = due(plans)
    shares = [due(running.share_out(plans, Index(number, count))) for number in range(count)]
    assert sorted(sum(shares, [])) == sorted(wanted) and len(set(wanted)) == 8
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    # The shares do not depend on the records.
    add(plans[0].results, job_of(one), 0.9)
    assert wanted[0] not in due(plans)
    for number, share in enumerate(shares):
        left = [key for key in share if key != wanted[0]]
        assert due(running.share_out(plans, Index(number, count))) == left


def test_a_search_and_its_measurements_are_one_share(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    cells = [cell for cell in table.cells.values() if not cell.unknown]
    actual = arrays.units(table, cells, 5)
    assert len(actual) == len({cell.tuned_by or cell.name for cell in cells})
    form = tuned(write(tmp_path), 3)
    first, second = (
        running.share_out([plan(form, Results(form, tmp_path))], Index(number, 2))[0]
        for number in range(2)
    )
    assert {job.cell.name for job in first.due()} == {"lamb"}
    assert {job.cell.name for job in second.due()} == {"adamw"}
    for job in first.due():
        add(first.results, job, 0.8)
    assert [job.factor for job in first.due()] == [None] * 3  # the search is complete
    assert all(job.factor is not None for job in second.due())


def test_records_of_jobs_are_gathered_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    form = tuned(write(tmp_path), 2)
    folder = tmp_path / "records"
    jobs = engine.searches(form, form.scales["small"], form.cells["lamb"])
    for number, job in enumerate(jobs):
        add(Results(form, folder / Index(number, 2).folder), job, 0.5 + number / 10)
    measured = job_of(form)._replace(chosen=form.tuning.factors[1] if form.tuning else 1.0)
    add(Results(form, folder / Index(0, 3).folder), measured, 0.9, chosen=measured.chosen)
    results, others = running.records_of(form, folder, None, folder)
    assert len(others) == 3
    full = plan(form, results)._replace(others=others)
    full.gather()
    assert "small/digits: 3 records of array jobs added\n" in capsys.readouterr().out
    assert results.of(measured) is not None and len(list(results)) == 3
    full.gather()
    assert not capsys.readouterr().out
    # A job's own folder is not among the folders of other jobs.
    own, others = running.records_of(form, folder, Index(0, 2), folder)
    assert len(list(own)) == 1 and len(others) == 2


HOSTILE = [
    *"3 3/3 -1/3 0/0 1/2/3 a/b 0/100001 $(x)/2 ٠/٣ '0/3' --index=0/3".split(),
    *("", " 0/3", "0/3\n", "0/3\x1b[2J", "9" * 40 + "/" + "9" * 41),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_other_indices_are_rejected(text: str) -> None:
    with rejected("--index", text, "is not INDEX/COUNT", "INDEX from 0 to COUNT - 1") as caught:
        arrays.parse(text)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_an_index_needs_a_folder_of_records(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    with rejected("--records", ..., "is missing", "give --records=FOLDER"):
        call(tmp_path, "run", "small", "--index=0/3", f"--runs={tmp_path / 'runs'}")
    assert not (tmp_path / "runs").exists()


def test_what_other_jobs_have_is_not_due(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    records = tmp_path / "records"
    add(Results(table, records / "index-0-of-2"), job_of(table), 0.9)
    options = (f"--records={records}", f"--runs={tmp_path / 'runs'}", "--dry-run")
    output = call(tmp_path, "run", "small", *options)
    assert "3 runs to train\n" in output and "lamb-small-seed0" not in output
    # In another array, the share of a job includes the run; the job uses the existing record.
    assert "0 runs to train" in call(tmp_path, "run", "small", "--index=0/4", *options)
    assert call(tmp_path, "run", "small", "--index=3/4", *options).endswith("adamw-small-seed1\n")


def test_adopt_takes_a_folder(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    records = tmp_path / "records"
    add(Results(table, records), job_of(table, "adamw"), 0.7)
    for seed in range(2):
        add(Results(table, records / Index(seed, 2).folder), job_of(table, seed=seed), 0.9)
    form = tuned(table, 2)
    for number, job in enumerate(engine.searches(form, form.scales["small"], form.cells["lamb"])):
        add(Results(form, records / Index(number, 2).folder), job, 0.8)
    output = call(tmp_path, "adopt", str(records)).splitlines()
    assert len(output) == 5 and "small/digits: lamb-small-seed1" in output
    assert len(list(Results(table))) == 3 and len(list(Results(form))) == 2
    (records / "index-0-of-2" / "small" / "digits.jsonl").write_text("{")
    with rejected("*index-0-of-2/small/digits.jsonl", ..., "is damaged"):
        call(tmp_path, "adopt", str(records))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        call(tmp_path, "adopt", str(tmp_path / "empty"))


def test_records_in_a_bucket(tmp_path: pathlib.Path, bucket: gcs.Store) -> None:
    table = write(tmp_path)
    folder = buckets.parse("gs://bucket/records", "--records")
    for seed in range(2):
        add(Results(table, folder / Index(seed, 2).folder), job_of(table, seed=seed), 0.9)
    names = {path.name for path in arrays.folders(folder)}
    assert names == {"index-0-of-2", "index-1-of-2"}
    output = call(tmp_path, "run", "small", "--dry-run", "--records=gs://bucket/records")
    assert "2 runs to train" in output
    assert len(call(tmp_path, "adopt", "gs://bucket/records").splitlines()) == 2
    assert len(list(Results(table))) == 2
    assert any(name.endswith("index-1-of-2/small/digits.configs.json") for name in bucket.names())


def start_job(folder: pathlib.Path, index: str) -> "subprocess.Popen[str]":
    return start(folder, f"--records={folder / 'records'}", f"--index={index}")


@pytest.mark.long
def test_three_jobs_are_one_run_of_the_table(tmp_path: pathlib.Path) -> None:
    """Three array jobs train each run once, although one is killed, one is preempted, and both restart."""
    table = write(tmp_path, TABLE.replace("4 steps", "400 steps"))
    jobs = {index: start_job(tmp_path, index) for index in ("0/3", "1/3", "2/3")}
    rng = random.Random(0)
    for index, number in (("1/3", signal.SIGKILL), ("2/3", signal.SIGTERM)):
        process = jobs[index]
        assert process.stdout is not None
        next(line for line in process.stdout if "run 1 of" in line)
        time.sleep(rng.uniform(2, 4))
        process.send_signal(number)
        process.communicate()
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 75}[number]
        jobs[index] = start_job(tmp_path, index)
    for index, process in jobs.items():
        output, _ = process.communicate()
        assert process.returncode == 0 and f"records of index {index[0]} are complete" in output
    assert len(call(tmp_path, "adopt", str(tmp_path / "records")).splitlines()) == 4
    alone = tmp_path / "alone"
    call(tmp_path, "run", "small", f"--records={alone}", f"--runs={alone}")
    assert plain(Results(table)) == plain(Results(table, alone))


@pytest.mark.long
def test_a_job_works_in_a_bucket(tmp_path: pathlib.Path, bucket: gcs.Store) -> None:
    table = write(tmp_path)
    options = ("--records=gs://bucket/records", "--runs=gs://bucket/runs", "--seeds=1")
    for number in range(2):
        output = call(tmp_path, "run", "small", f"--index={number}/2", *options)
        assert "run 1 of 1" in output
    call(tmp_path, "adopt", "gs://bucket/records")
    alone = tmp_path / "alone"
    call(tmp_path, "run", "small", f"--records={alone}", "--seeds=1", f"--runs={alone}")
    assert plain(Results(table)) == plain(Results(table, tmp_path / "alone"))


@pytest.mark.long
def test_a_sweep_is_an_array(tmp_path: pathlib.Path) -> None:
    def sweep(name: str, *more: str) -> str:
        done = tiny.command(
            "lamb_tpu.sweep",
            "--config=digits:batch=128",
            "--config.duration=4 steps",
            "--search=optimizer.learning_rate=log(1e-3,1e-1)",
            "--trials=3",
            f"--workdir={tmp_path / name}",
            *more,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for number in range(3):
        output = sweep("array", f"--index={number}/3")
        assert f"run 1 of 1: trial-00{number}" in output
        assert "same command without --index" in output
    output = sweep("array")
    assert "sweep: 3 records of array jobs added" in output and "run 1 of" not in output
    sweep("alone")
    actual = [
        [json.loads(line) for line in (tmp_path / name / "sweep.jsonl").read_text().splitlines()]
        for name in ("array", "alone")
    ]
    for record in sum(actual, []):
        for key in _OF_THE_RUN:
            del record[key]
    assert actual[0] == actual[1] and (tmp_path / "array" / "sweep.md").exists()
