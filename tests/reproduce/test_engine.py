"""Missing runs are trained once; a diverged run counts as a result."""

import pathlib
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from msgspec.structs import replace

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.engine import RunSetup
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import summaries
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store.metrics import read_records
from tests.raising import rejected
from tests.reproduce.papers import TABLE, TUNED, setup, taking, with_keys, write
from tests.reproduce.test_results import add, job_of


def test_seeds_together(tmp_path: pathlib.Path) -> None:
    """Runs that share one program have the same records as single runs, except for the times."""
    table = write(tmp_path)
    jobs = [job for job in due(table, 2) if job.cell.name == "lamb"]
    assert engine.can_share(jobs[0]) and [job.seed for job in jobs] == [0, 1]
    actual = engine.execute_together(jobs, setup(tmp_path))
    for job, finished in zip(jobs, actual, strict=True):
        alone = engine.execute(job, RunSetup(tmp_path / "alone", None))
        assert finished.record.pop("together") == 2
        del finished.record["seconds"], alone.record["seconds"]
        assert finished == alone


def test_runs_whose_host_adds_microbatches_are_trained_one_by_one(tmp_path: pathlib.Path) -> None:
    counted = TABLE.replace(
        "overrides = {",
        'overrides = {"batch_rule.name" = "ramp", "batch_rule.points" = [[0, 128]], ',
    )
    table = write(tmp_path, counted)
    assert not engine.can_share(due(table)[0])


def due(table: Table, seeds: int = 1) -> list[Job]:
    scale = table.scales["small"]
    return engine.due(table, scale, table.cells.values(), seeds, Results(table))


def test_run(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    results = Results(table)
    assert [job.name for job in due(table)] == ["lamb-small-seed0", "adamw-small-seed0"]

    engine.run_one_by_one(
        taking(due(table)),
        setup(tmp_path),
        lambda finished: results.add(finished.record, finished.configs),
    )
    assert due(table) == []
    assert [job.name for job in due(table, 2)] == ["lamb-small-seed1", "adamw-small-seed1"]
    (folder,) = (tmp_path / "runs" / "small" / "digits").glob("lamb-small-seed0-*")
    actual = next(record for record in results if record["cell"] == "lamb")
    last = read_records(folder / "metrics.jsonl", "eval")[-1]
    assert actual["values"] == {key: last[key] for key in ("accuracy", "loss")}
    assert actual["updates"] == 4 and actual["batch"] == 128 and actual["optimizer"] == "lamb"
    assert actual["evaluations"][-1] == [round(last["epoch"], 4), round(last["accuracy"], 5)]
    assert [step for step, _ in actual["losses"]] == [2, 4]
    assert folder.name.endswith(actual["config"])
    # A complete run that was killed before its record was written does not train again.
    before = (folder / "metrics.jsonl").read_text()
    finished = engine.execute(job_of(table), setup(tmp_path))
    assert finished.record == actual and (folder / "metrics.jsonl").read_text() == before


def test_speed_is_a_metric(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TABLE.replace('key = "accuracy"', 'key = "examples_per_second"'))
    finished = engine.execute(job_of(table), setup(tmp_path))
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
    compilation_cache.reset_cache()  # an earlier test may have set its folder
    actual = []
    try:
        for seed in (0, 1):
            engine.execute(job_of(table, seed=seed), setup(tmp_path))
            actual.append({path.name for path in tmp_path.rglob("jit_train_step*-cache")})
        assert len(actual[0]) == 1 and actual[1] == actual[0]
        assert {path.name for path in (tmp_path / "runs").iterdir()} == {"compiled", "small"}
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_diverged_is_a_result(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        "overrides = {",
        'overrides = {"optimizer.learning_rate" = 1e38, "schedule.warmup" = '
        '"0 steps", "guards.max_skipped" = 0, ',
    )
    table = write(tmp_path, text)
    job = job_of(table, "adamw")
    finished = engine.execute(job, setup(tmp_path))
    assert finished.record["values"] is None and "inf" in finished.record["diverged"]
    Results(table).add(finished.record, finished.configs)
    assert Results(table).holds(job)


@pytest.mark.long
def test_stages(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'config = "digits:batch=128"', 'stages = ["digits:batch=64", "digits:batch=128"]'
    ).replace('"optimizer=lamb"', '"optimizer=adamw"')
    table = write(tmp_path, text)
    finished = engine.execute(job_of(table), setup(tmp_path))
    assert [flat["batch_size"] for flat in finished.configs] == [64, 128]
    assert [flat["optimizer.name"] for flat in finished.configs] == ["adamw", "lamb"]
    (folder,) = (tmp_path / "runs" / "small" / "digits").iterdir()
    assert (folder / "stage_2" / "init.json").exists()


def test_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    scale, cell = table.scales["small"], table.cells["lamb"]
    wanted = engine.searches(table, scale, cell)
    expected = [(0.5, 0), (0.5, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(job.factor, job.seed) for job in wanted] == expected
    results = Results(table)
    for job, accuracy in zip(wanted, (0.9, 0.8, 0.95, None, 0.85, 0.87)):
        assert engine.best_factor(wanted, results) is None
        assert engine.measurements(table, scale, cell, 1, results) is None
        add(results, job, accuracy)
    # The mean is 0.85 at factor 0.5 and 0.86 at factor 2; at factor 1 a run diverged.
    assert engine.best_factor(wanted, results) == 2
    assert engine.search_means(wanted, results) == pytest.approx(
        {0.5: 0.85, 1: float("-inf"), 2: 0.86}
    )
    actual = summaries(table, scale, results)[0]
    assert actual.search == (
        "optimizer.learning_rate 0.005: 85.0, 0.01: diverged, 0.02: 86.0 (chosen)"
    )
    assert actual.status == "not run"
    # A run at chance level has diverged too, even if the mean over the seeds is above chance.
    metric = replace(scale.metric, chance=0.8)
    at_chance = [job._replace(scale=scale._replace(metric=metric)) for job in wanted]
    assert engine.search_means(at_chance, results) == pytest.approx(
        {0.5: float("-inf"), 1: float("-inf"), 2: 0.86}
    )
    (job,) = engine.measurements(table, scale, cell, 1, results) or []
    assert (job.chosen, job.factor) == (2, None)
    assert engine.searches(table, scale, table.cells["lars"]) == []
    assert engine.measurements(table, scale, table.cells["lars"], 1, results) == []


def test_several_cells_have_one_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, with_keys(TUNED, adamw='tuned_by = "lamb"'))
    actual = due(table)
    assert len(actual) == 6 and {job.cell.name for job in actual} == {"lamb"}
    results = Results(table)
    for job, accuracy in zip(actual, (0.9, 0.9, 0.8, 0.8, 0.7, 0.7)):
        add(results, job, accuracy)
    assert [(job.cell.name, job.chosen) for job in due(table)] == [("lamb", 0.5), ("adamw", 0.5)]
    first, second, _ = summaries(table, table.scales["small"], results)
    assert first.search and not second.search


@pytest.mark.parametrize("recipe, message", [("digits:btach=128", "btach"), ("digitz", "'digitz'")])
def test_errors_are_reported_before_training(
    tmp_path: pathlib.Path, recipe: str, message: str
) -> None:
    table = write(tmp_path, TABLE.replace("digits:batch=128", recipe))
    with pytest.raises(UserError, match=message):
        engine.check([job_of(table)], setup(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_metric_that_is_never_measured_is_rejected_before_training(
    tmp_path: pathlib.Path,
) -> None:
    table = write(tmp_path, TABLE.replace('key = "accuracy"', 'key = "bleu"'))
    job = job_of(table)
    with rejected("*digits.toml: metric.key", "bleu", "which the task 'classification' does not"):
        engine.check([job], setup(tmp_path))
    # `check` skips custom tasks, so a run also rejects the metric, before its first update.
    with pytest.raises(UserError, match="metric.*'bleu'"):
        engine.execute(job, setup(tmp_path))
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_data_that_is_missing_is_asked_for_by_its_option(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TABLE.replace("examples = 1_437\n", 'data = ["questions"]\n')
    text = text.replace('"log.every" = "2 steps"', '"data.name" = "squad"')
    table = write(tmp_path, text + '\n[scales.smoke]\nconfig = "digits:smoke"\n')
    job = job_of(table)
    with pytest.raises(UserError) as error:
        engine.check([job], setup(tmp_path))
    assert str(error.value) == (
        "--data is missing: small/digits at the scale small reads squad from the folder questions "
        "of --data=DIR; run `python -m lamb_tpu.reproduce commands small/digits --scale=small` to see "
        "what it must contain and how to create it, or use --scale=smoke, which needs no data"
    )
    engine.check([job._replace(scale=table.scales["smoke"])], setup(tmp_path))
    there = RunSetup(tmp_path / "runs", tmp_path)
    with rejected("--data", str(tmp_path), "has no questions", "how to create it"):
        engine.check([job], there)
    text = table.path.read_text().replace("questions", "digits8").replace("squad", "mnist")
    downloaded = job_of(write(tmp_path / "downloaded", text))
    with rejected("--data", str(tmp_path), "has no digits8", "leave --data out to download"):
        engine.check([downloaded], there)
    # A download fails later, with an error about a key that `run` cannot set.
    engine.check([downloaded], setup(tmp_path))

    def fail(*arguments: Any, **more: Any) -> None:
        raise UserError("mnist", problem="has no network", remedy="give --config.data.dir=FOLDER")

    monkeypatch.setattr(engine, "train", fail)
    remedy = "=FOLDER (here: --data=DIR, which has that folder"
    with rejected("mnist", ..., "has no network", remedy):
        engine.execute(downloaded, setup(tmp_path))
