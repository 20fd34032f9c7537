"""A finished run from another machine is matched to its cell, or rejected with an error."""

import json
import pathlib
import shutil

import pytest

from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import adopting, engine
from lamb_tpu.reproduce.engine import Finished
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests import tiny
from tests.raising import rejected
from tests.reproduce.papers import TABLE, setup, write
from tests.store.test_runs import fake


def run(tmp_path: pathlib.Path, table: Table, cell: str = "adamw", seed: int = 7) -> pathlib.Path:
    engine.execute(Job(table, table.scales["small"], table.cells[cell], seed), setup(tmp_path))
    (folder,) = (tmp_path / "runs" / "small" / "digits").iterdir()
    return folder.rename(tmp_path / "elsewhere")


def test_adopt(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    finished = adopting.find({table.key: table}, run(tmp_path, table))
    assert (finished.job.cell.name, finished.job.seed) == ("adamw", 7)
    Results(table).add(finished.record, finished.configs)
    assert Results(table).holds(finished.job)


def test_a_run_whose_batch_changes(tmp_path: pathlib.Path) -> None:
    rule = '"batch_rule.name" = "ramp", "batch_rule.points" = [[0, 64], [1000, 256]]'
    text = TABLE.replace("digits:batch=128", "digits:batch=64").replace(
        'duration = "4 steps"', f'duration = "60 steps", accumulation_steps = 4, {rule}'
    )
    table = write(tmp_path, text)
    record = adopting.find({table.key: table}, run(tmp_path, table)).record
    # The run has the examples of 60 updates of 64, but only 27 updates, because its batch grows.
    assert (record["updates"], record["examples"]) == (27, 60 * 64)


def test_a_run_on_a_tpu_can_join_the_calibration(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path)
    job = Job(table, table.scales["small"], table.cells["adamw"], 7)
    monkeypatch.setattr(Results, "add", lambda *arguments: None)
    for device, lines in (("cpu", 1), ("TPU v4", 2)):
        finished = Finished(job, {"device": device}, [])
        monkeypatch.setattr(adopting, "find", lambda *arguments, actual=finished: actual)
        printed = adopting.take({table.key: table}, tmp_path)
        assert len(printed) == lines
    assert "python -m experiments.plan --add=WORKDIR" in printed[1]


@pytest.mark.long
def test_stages_are_followed(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'config = "digits:batch=128"', 'stages = ["digits:batch=64", "digits:batch=128"]'
    )
    table = write(tmp_path, text)
    folder = run(tmp_path, table)
    # The workdir of the first stage was moved, but is still beside the workdir of the last stage.
    actual = adopting.find({table.key: table}, folder / "stage_2")
    assert actual.job.cell.name == "adamw" and len(actual.configs) == 2
    shutil.rmtree(folder / "stage_1")
    with rejected(folder / "stage_2", ..., "stage_1, which does not exist", "copy that run to"):
        adopting.find({table.key: table}, folder / "stage_2")


def test_a_run_may_end_at_its_target(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'duration = "4 steps"',
        (
            'duration = "9 steps", "eval.every" = "1 steps", "target.metric" = "accuracy", '
            '"target.value" = 0.0001'
        ),
    )
    table = write(tmp_path, text)
    finished = adopting.find({table.key: table}, run(tmp_path, table))
    assert finished.record["updates"] < 9


def test_rejected(tmp_path: pathlib.Path) -> None:
    folder = run(tmp_path, write(tmp_path))
    table = write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    changed = "this run, 'now' is the table): duration: '4 steps' there, '5 steps' now"
    nearest = "the nearest cell, adamw-small of small/digits, has another config ('there' is "
    with rejected(folder, ..., f"matches no table: {nearest}{changed}"):
        adopting.find({table.key: table}, folder)
    table = write(tmp_path)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(
        "".join(line for line in metrics.read_text().splitlines(True) if '"eval"' not in line)
    )
    with rejected(folder, ..., "no evaluation at its end", "let the run finish"):
        adopting.find({table.key: table}, folder)
    with pytest.raises(UserError, match="holds no run"):
        adopting.find({table.key: table}, tmp_path)


@pytest.mark.parametrize(
    "key, value, remedy",
    [
        ("seed", [0], "use the type int"),
        ("init_from", 5, "use the type str"),
        ("model.name", None, "use the type str"),
        ("batch_size", 10**30, "use at most"),
        ("made", [{"up": [10**400]}], "use at most"),
    ],
)
def test_every_value_of_a_stored_config_is_checked(
    tmp_path: pathlib.Path, key: str, value: object, remedy: str
) -> None:
    table = write(tmp_path)
    fake(tmp_path / "run", [0.5])
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    named = f"{config}: {key}" + "[1]" * (key == "made")
    with rejected(named, ..., "is not valid", remedy):
        adopting.take({table.key: table}, tmp_path / "run")


def test_a_chain_that_returns_to_a_run_is_rejected(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(init_from=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(flatten(config)))
    with rejected("*", problem="continues more than 9 runs by config.init_from"):
        adopting._chain(tmp_path)
