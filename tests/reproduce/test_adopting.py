"""A finished run made elsewhere finds its cell; another run is refused in one sentence."""

import pathlib
import shutil

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import adopting, engine
from lamb_tpu.reproduce.engine import Finished
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, place, write


def run(tmp_path: pathlib.Path, table: Table, cell: str = "adamw", seed: int = 7) -> pathlib.Path:
    engine.execute(Job(table, table.scales["small"], table.cells[cell], seed), place(tmp_path))
    (folder,) = (tmp_path / "runs" / "small" / "digits").iterdir()
    return folder.rename(tmp_path / "elsewhere")


def test_adopt(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    finished = adopting.find({table.key: table}, run(tmp_path, table))
    assert (finished.job.cell.name, finished.job.seed) == ("adamw", 7)
    Results(table).add(finished.record, finished.configs)
    assert Results(table).holds(finished.job)


def test_a_run_on_a_tpu_can_join_the_calibration(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path)
    job = Job(table, table.scales["small"], table.cells["adamw"], 7)
    monkeypatch.setattr(Results, "add", lambda *arguments: None)
    for device, lines in (("cpu", 1), ("TPU v4", 2)):
        finished = Finished(job, {"device": device}, [])
        monkeypatch.setattr(adopting, "find", lambda *arguments, found=finished: found)
        printed = adopting.take({table.key: table}, tmp_path)
        assert len(printed) == lines
    assert "python -m experiments.plan --add=WORKDIR" in printed[1]


@pytest.mark.long
def test_stages_are_followed(tmp_path: pathlib.Path) -> None:
    table = write(
        tmp_path,
        TABLE.replace(
            'config = "digits:batch=128"', 'stages = ["digits:batch=64", "digits:batch=128"]'
        ),
    )
    folder = run(tmp_path, table)
    # The first stage is found beside the last, although it is not where it was.
    found = adopting.find({table.key: table}, folder / "stage_2")
    assert found.job.cell.name == "adamw" and len(found.configs) == 2
    shutil.rmtree(folder / "stage_1")
    with pytest.raises(UserError, match="began with the weights of .*stage_1, which is not there"):
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


def test_refused(tmp_path: pathlib.Path) -> None:
    folder = run(tmp_path, write(tmp_path))
    table = write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    with pytest.raises(
        UserError,
        match=(
            "is of no table; the nearest is small/digits, adamw-small, from which it differs in "
            "duration: '4 steps' there, '5 steps' now"
        ),
    ):
        adopting.find({table.key: table}, folder)
    table = write(tmp_path)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(
        "".join(line for line in metrics.read_text().splitlines(True) if '"eval"' not in line)
    )
    with pytest.raises(UserError, match="no evaluation at its end; let it finish"):
        adopting.find({table.key: table}, folder)
    with pytest.raises(UserError, match="holds no run"):
        adopting.find({table.key: table}, tmp_path)
