"""Missing runs are trained once; a run that diverges is a result."""

import pathlib
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.engine import Place
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import summaries
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store.metrics import read_records
from tests.reproduce.papers import TABLE, place, write
from tests.reproduce.test_jobs import TUNED
from tests.reproduce.test_results import add


def due(table: Table, seeds: int = 1) -> list[Job]:
    scale = table.scales["small"]
    return engine.due(table, scale, table.cells.values(), seeds, Results(table))


def test_run(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    results, told = Results(table), []
    assert [job.name for job in due(table)] == ["lamb-small-seed0", "adamw-small-seed0"]

    def done(finished: engine.Finished) -> None:
        results.add(finished.record, finished.configs)

    engine.run_one_by_one(due(table), place(tmp_path), lambda job: told.append(job.name), done)
    assert told == ["lamb-small-seed0", "adamw-small-seed0"] and due(table) == []
    assert [job.name for job in due(table, 2)] == ["lamb-small-seed1", "adamw-small-seed1"]
    (folder,) = (tmp_path / "runs" / "small" / "digits").glob("lamb-small-seed0-*")
    found = next(record for record in results if record["cell"] == "lamb")
    last = read_records(folder / "metrics.jsonl", "eval")[-1]
    assert found["values"] == {key: last[key] for key in ("accuracy", "loss")}
    assert found["updates"] == 4 and found["batch"] == 128 and found["optimizer"] == "lamb"
    assert found["evaluations"][-1] == [round(last["epoch"], 4), round(last["accuracy"], 5)]
    assert [step for step, _ in found["losses"]] == [2, 4]
    assert folder.name.endswith(found["config"])
    # A run that is complete but has no record, as after a kill between the two, trains nothing.
    before = (folder / "metrics.jsonl").read_text()
    finished = engine.execute(
        Job(table, table.scales["small"], table.cells["lamb"], 0), place(tmp_path)
    )
    assert finished.record == found and (folder / "metrics.jsonl").read_text() == before


def test_speed_is_a_metric(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TABLE.replace('key = "accuracy"', 'key = "examples_per_second"'))
    job = Job(table, table.scales["small"], table.cells["lamb"], 0)
    finished = engine.execute(job, place(tmp_path))
    (folder,) = (tmp_path / "runs" / "small" / "digits").iterdir()
    rates = [
        record["examples_per_second"]
        for record in read_records(folder / "metrics.jsonl", "train")
        if "examples_per_second" in record
    ]
    assert min(rates) <= finished.record["values"]["examples_per_second"] <= max(rates)


@pytest.mark.long
def test_runs_share_their_programs(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # an earlier test may have opened its folder
    found = []
    try:
        for seed in (0, 1):
            job = Job(table, table.scales["small"], table.cells["lamb"], seed)
            engine.execute(job, place(tmp_path))
            found.append({path.name for path in tmp_path.rglob("jit_train_step*-cache")})
        assert len(found[0]) == 1 and found[1] == found[0]
        assert {path.name for path in (tmp_path / "runs").iterdir()} == {"compiled", "small"}
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_diverged_is_a_result(tmp_path: pathlib.Path) -> None:
    table = write(
        tmp_path,
        TABLE.replace(
            "overrides = {",
            'overrides = {"optimizer.learning_rate" = 1e38, "schedule.warmup" = '
            '"0 steps", "guards.max_skipped" = 0, ',
        ),
    )
    job = Job(table, table.scales["small"], table.cells["adamw"], 0)
    finished = engine.execute(job, place(tmp_path))
    assert finished.record["values"] is None and "inf" in finished.record["diverged"]
    Results(table).add(finished.record, finished.configs)
    assert Results(table).holds(job)


@pytest.mark.long
def test_stages(tmp_path: pathlib.Path) -> None:
    table = write(
        tmp_path,
        TABLE.replace(
            'config = "digits:batch=128"', 'stages = ["digits:batch=64", "digits:batch=128"]'
        ).replace('"optimizer=lamb"', '"optimizer=adamw"'),
    )
    job = Job(table, table.scales["small"], table.cells["lamb"], 0)
    finished = engine.execute(job, place(tmp_path))
    assert [flat["batch_size"] for flat in finished.configs] == [64, 128]
    assert [flat["optimizer.name"] for flat in finished.configs] == ["adamw", "lamb"]
    (folder,) = (tmp_path / "runs" / "small" / "digits").iterdir()
    assert (folder / "stage_2" / "init.json").exists()


def test_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    scale, cell = table.scales["small"], table.cells["lamb"]
    wanted = engine.searches(table, scale, cell)
    assert [(job.factor, job.seed) for job in wanted] == [
        (0.5, 0),
        (0.5, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    results = Results(table)
    for job, accuracy in zip(wanted, (0.9, 0.8, 0.95, None, 0.85, 0.87)):
        assert engine.best_factor(wanted, results) is None
        assert engine.measurements(table, scale, cell, 1, results) is None
        add(results, job, accuracy)
    # The mean of 0.5 is 0.85, of 2 it is 0.86, and one run of 1 diverged.
    assert engine.best_factor(wanted, results) == 2
    assert engine.search_means(wanted, results) == pytest.approx(
        {0.5: 0.85, 1: float("-inf"), 2: 0.86}
    )
    found = summaries(table, scale, results)[0]
    assert found.search == (
        "optimizer.learning_rate 0.005: 85.0, 0.01: diverged, 0.02: 86.0 (chosen)"
    )
    assert found.status == "not run"
    (job,) = engine.measurements(table, scale, cell, 1, results) or []
    assert (job.chosen, job.factor) == (2, None)
    assert engine.searches(table, scale, table.cells["lars"]) == []
    assert engine.measurements(table, scale, table.cells["lars"], 1, results) == []


def test_several_cells_have_one_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED.replace('name = "adamw"', 'name = "adamw", tuned_by = "lamb"'))
    found = due(table)
    assert len(found) == 6 and {job.cell.name for job in found} == {"lamb"}
    results = Results(table)
    for job, accuracy in zip(found, (0.9, 0.9, 0.8, 0.8, 0.7, 0.7)):
        add(results, job, accuracy)
    assert [(job.cell.name, job.chosen) for job in due(table)] == [("lamb", 0.5), ("adamw", 0.5)]
    first, second, _ = summaries(table, table.scales["small"], results)
    assert first.search and not second.search


@pytest.mark.parametrize(
    "text, data, message",
    [
        (TABLE.replace("seeds = 2", 'data = ["mnist"]'), "data", "--data .* has no mnist, which"),
        (TABLE.replace("digits:batch=128", "digits:btach=128"), None, "unknown key 'btach'"),
        (TABLE.replace("digits:batch=128", "digitz"), None, "'digitz', which does not exist"),
    ],
)
def test_mistakes_are_told_before_anything_trains(
    tmp_path: pathlib.Path, text: str, data: Any, message: str
) -> None:
    table = write(tmp_path, text)
    where = Place(tmp_path / "runs", data and tmp_path / data)
    with pytest.raises(UserError, match=message):
        engine.check([Job(table, table.scales["small"], table.cells["lamb"], 0)], where)
    assert not (tmp_path / "runs").exists()
