"""Records are moved between machines in one file; records with other configs are rejected."""

import json
import pathlib

import pytest

from lamb_tpu.reproduce import carrying, loading
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tuning import forms, tuned
from tests.raising import rejected
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of


def test_there_and_back(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    there, file = Results(table, tmp_path / "there"), tmp_path / "file.json"
    for seed in (0, 1):
        add(there, job_of(table, seed=seed), 0.9)
    form = tuned(table, 2)
    searched = Results(form, tmp_path / "there")
    for factor in form.tuning.factors if form.tuning else ():
        add(searched, job_of(form)._replace(factor=factor), 0.8)
    carrying.write(file, [(table, there), (form, searched)])
    output = carrying.take(file, {table.key: table})
    assert output[:2] == ["small/digits: lamb-small-seed0", "small/digits: lamb-small-seed1"]
    assert len(output) == 4 and list(Results(table)) == list(there)
    assert list(Results(form)) == list(searched) and len(forms(table, None)) == 2


def test_what_does_not_fit_is_left_out(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    there, file = Results(table, tmp_path / "there"), tmp_path / "file.json"
    add(there, job_of(table), 0.9)
    carrying.write(file, [(table, there)])
    changed = write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    with rejected(file, ..., "lamb-small, seed 0: duration: '4 steps' there") as caught:
        carrying.take(file, {table.key: changed})
    assert caught.value.problem.startswith(": 0 record(s) were added, but 1 were rejected")
    gone = write(tmp_path, TABLE.replace('"lamb"', '"lion"'))
    with rejected(file, ..., "seed 0: there is no such cell"):
        carrying.take(file, {table.key: gone})
    with rejected(file, ..., "there is no table 'small/digits'"):
        carrying.take(file, {})
    assert not table.records.exists()


def test_records_of_changed_code_stay_out_of_the_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path)
    there, file = Results(table, tmp_path / "there"), tmp_path / "file.json"
    add(there, job_of(table), 0.9)
    add(there, job_of(table, seed=1), 0.9, commit="0123456789ab+")
    carrying.write(file, [(table, there)])
    monkeypatch.setattr(loading, "folder", lambda: tmp_path)
    with rejected(file, ..., ": 1 record(s) were added, but 1 were rejected") as caught:
        carrying.take(file, {table.key: table})
    assert ", seed 1: " in caught.value.problem and "of committed code" in caught.value.problem
    assert [record["seed"] for record in Results(table)] == [0]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        "[1]",
        json.dumps([{"table": "small/digits"}]),
        json.dumps([{"table": "a", "form": "", "runs": [{"record": {"seed": 1}, "configs": 5}]}]),
    ],
)
def test_damaged(tmp_path: pathlib.Path, content: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with rejected(file, ..., "is neither a workdir nor a file of `run --carry`"):
        carrying.take(file, {})


def test_nothing_is_taken_to_damaged_records(tmp_path: pathlib.Path) -> None:
    tables = {"small/a": write(tmp_path, name="a"), "small/b": write(tmp_path, name="b")}
    file, measured = tmp_path / "file.json", []
    for table in tables.values():
        measured.append((table, Results(table, tmp_path / "there")))
        add(measured[-1][1], job_of(table), 0.9)
    carrying.write(file, measured)
    damaged = tables["small/b"].records
    damaged.write_text("half a li")
    with rejected(damaged, ..., f"line 1 of {damaged} is not JSON"):
        carrying.take(file, tables)
    assert damaged.read_text() == "half a li" and not tables["small/a"].records.exists()
