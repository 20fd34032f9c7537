"""Tests that commands do not import the code that records and stored configs name."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
from absl import flags

from lamb_tpu import compare, plots, sweep
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import __main__ as reproduce
from lamb_tpu.reproduce import carrying, engine, jobs, sweeps
from lamb_tpu.reproduce.results import Results
from lamb_tpu.store.workdir import Workdir
from tests import tiny
from tests.reproduce.papers import TABLE, record, write
from tests.store.test_runs import fake

NAMES = ("optimizer", "model", "task", "data", "batch_rule", "parallel.exchange")
NAMED = {f"{section}.name": "marking:Part" for section in NAMES}


@pytest.fixture
def unread(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether the module 'marking' has not been imported."""
    mark = tmp_path / "mark"
    (tmp_path / "marking.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Part: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: not mark.exists() and "marking" not in sys.modules
    sys.modules.pop("marking", None)


def named(workdir: pathlib.Path) -> None:
    fake(workdir, [0.5, 0.7, 0.6])
    config = Workdir(workdir)
    stored = {**config.read_config(), **NAMED}
    for key in ("optimizer.learning_rate", "model.hidden_sizes", "task.input_std"):
        stored.pop(key, None)  # so that `compare` looks for the module's defaults
    config.config.write_text(json.dumps(stored))


def named_record(results: Results, cell: str, **more: object) -> None:
    flat = [{"batch_size": 128, "duration": "4 steps", **NAMED}]
    results.add(record(cell, 0, 0.9, config=jobs.config_hash(flat), **more), flat)


def call(*arguments: str) -> None:
    reproduce.main(reproduce._parse(list(arguments)))


def test_the_module_marks_its_import(unread: Callable[[], bool]) -> None:
    assert unread()
    __import__("marking")
    assert not unread()


@pytest.mark.parametrize("command", ["list", "show small", "report small", "run small --dry-run"])
def test_records_of_a_table(
    tmp_path: pathlib.Path,
    unread: Callable[[], bool],
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named_record(Results(write(tmp_path)), "lamb")
    call(*command.split(), f"--papers={tmp_path}")
    assert unread()
    if command == "show small":
        assert "model.name: 'marking:Part' there" in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides", ['"model.name" = "marking:Part"', '"optimizer.name" = "marking:Part"']
)
def test_a_table(
    tmp_path: pathlib.Path,
    unread: Callable[[], bool],
    overrides: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    papers = tmp_path / "small"  # a module beside a table belongs to the table's author
    papers.mkdir()
    (tmp_path / "marking.py").rename(papers / "marking.py")
    monkeypatch.syspath_prepend(papers)
    with pytest.raises(UserError, match="marking is in the folder of that file, .* --trust-papers"):
        write(tmp_path, TABLE.replace("overrides = {", f"overrides = {{{overrides}, "))
    assert unread()


@pytest.mark.parametrize("is_file", [False, True])
def test_adopt(tmp_path: pathlib.Path, unread: Callable[[], bool], is_file: bool) -> None:
    table, path = write(tmp_path), tmp_path / "elsewhere"
    if is_file:
        there = Results(table, tmp_path / "there")
        named_record(there, "lamb")
        carrying.write(path, [(table, there)])
    else:
        named(path)
    with pytest.raises(UserError, match="'marking:Part' there"):
        call("adopt", str(path), f"--papers={tmp_path}")
    assert unread()


def test_compare(tmp_path: pathlib.Path, unread: Callable[[], bool]) -> None:
    fake(tmp_path / "a", [0.5], optimizer__b2=0.5)
    named(tmp_path / "b")
    figure = tmp_path / "x.png"
    compare.main(compare._parse([str(tmp_path / "a"), str(tmp_path / "b"), f"--output={figure}"]))
    assert figure.exists() and unread()


def test_plots(
    tmp_path: pathlib.Path, unread: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    named(tmp_path / "run")
    layers = {"ratios/a": 1.0, "weight_norms/a": 1.0, "update_norms/a": 1.0}
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 12, "kind": "layers", **layers}) + "\n")
    (tmp_path / "run" / "parameters.txt").write_text(
        "path  shape  dtype  count  decay  adapt\na  3  float32  3  yes  yes\n"
    )
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", str(tmp_path / "run"), "", flag_values=values)
    flags.DEFINE_string("out", None, "", flag_values=values)
    values.mark_as_parsed()
    monkeypatch.setattr(flags, "FLAGS", values)
    plots.main()
    assert unread()


def test_a_sweep(tmp_path: pathlib.Path, unread: Callable[[], bool]) -> None:
    config = tiny.digits()
    dimensions, points = sweeps.points(config, ["optimizer.b2=0.9,0.99"], None, 0)
    made = sweeps.make("digits", jobs.JobStage("digits", {}).config(), dimensions, points, tmp_path)
    named_record(Results(made.table), "trial-000", scale=sweeps.NAME)
    results = Results(made.table)
    assert len(engine.due(made.table, made.scale, made.cells, 1, results)) == 2
    sweep.trials.rows(made, sweep.trials.ranked(made, results))
    assert unread()
