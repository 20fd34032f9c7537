"""The command line: its output, its errors, and commands that are killed at random moments."""

import contextlib
import io
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import reading
from lamb_tpu.reproduce import __main__ as command
from lamb_tpu.reproduce import loading, running
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tuning import tuned
from lamb_tpu.store import checkout
from lamb_tpu.store.metrics import read_records
from tests.raising import rejected
from tests.reproduce.papers import TABLE, TUNED, write
from tests.tiny import ROOT


def call(tmp_path: pathlib.Path, *arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command.main(command._parse([*arguments, f"--papers={tmp_path}"]))
    return out.getvalue()


@pytest.mark.long
def test_run_show_and_report(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    runs = f"--runs={tmp_path / 'runs'}"
    output = call(tmp_path, "list")
    assert "small/digits  Digits by optimizer\n    Table 9; measured: small 0 of 3" in output
    output = call(tmp_path, "run", "small", runs, "--seeds=1", "--dry-run")
    assert (
        output == "small/digits, small: 2 runs to train\n  lamb-small-seed0\n  adamw-small-seed0\n"
    )
    assert not (tmp_path / "runs").exists()
    output = call(tmp_path, "run", "small/digits", runs, "--seeds=1", "--cells=lamb")
    assert "small/digits: run 1 of 1: lamb-small-seed0" in output and "accuracy " in output
    output = call(tmp_path, "run", "small/digits", runs, "--seeds=1")
    assert "lamb-small" not in output and "run 1 of 1: adamw" in output
    shown = call(tmp_path, "show", "small")
    assert "arXiv:0000.00000, Table 9" in shown and "93.0 (recalled)" in shown
    assert "1 of 2 seeds" in shown and "settings not published" in shown
    assert "2 of 3" in call(tmp_path, "list")
    printed = call(tmp_path, "commands", "small")
    assert printed.count("python -m lamb_tpu.train --config=digits:batch=128,optimizer=") == 2
    output = call(tmp_path, "report", f"--html={tmp_path / 'site'}")
    assert output.split() == [str(tmp_path / "report/README.md"), str(tmp_path / "site/index.html")]
    # A report of one table leaves the list of all tables unchanged.
    (tmp_path / "report/README.md").write_text("all")
    assert str(tmp_path / "report/small-digits.md") in call(tmp_path, "report", "small").split()
    assert (tmp_path / "report/README.md").read_text() == "all"
    # Records in a folder outside of the checkout.
    mine = f"--records={tmp_path / 'mine'}"
    before = table.records.read_text()
    output = call(tmp_path, "run", "small", runs, mine, "--cells=lamb", "--seeds=1")
    assert "run 1 of 1: lamb-small-seed0" in output and table.records.read_text() == before
    assert (tmp_path / "mine" / "small" / "digits.jsonl").exists()
    assert re.search(r"(?m)^  adamw .* not run$", call(tmp_path, "show", "small", mine))
    output = call(tmp_path, "report", "small", mine, f"--output={tmp_path / 'mine' / 'report'}")
    for name in ("small-digits.md", "small-digits-small-training.svg"):
        assert str(tmp_path / "mine" / "report" / name) in output.splitlines()
    assert all(pathlib.Path(line).exists() for line in output.splitlines())
    page = (tmp_path / "mine" / "report" / "small-digits.md").read_text()
    assert "| adamw | not run | 92.5 (seen) | - |" in page
    # If the table changes, its cells become stale and are run again.
    write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    shown = call(tmp_path, "show", "small")
    assert re.search(r"lamb: 1 stale, [\d.]+: duration: '4 steps' there, '5 steps' now", shown)
    assert call(tmp_path, "run", "small", runs, "--seeds=1").count("run 1 of 2") == 1
    assert {r["updates"] for r in Results(table)} == {5}


def test_seeds_together(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    runs = f"--runs={tmp_path / 'runs'}"
    output = call(tmp_path, "run", "small", runs, "--cells=lamb", "--seeds=2", "--together")
    assert "run 1 of 2: lamb-small-seed0\nsmall/digits: run 2 of 2: lamb-small-seed1\n" in output
    assert [(r["seed"], r["together"]) for r in Results(table)] == [(0, 2), (1, 2)]
    output = call(tmp_path, "run", "small", runs, "--cells=lamb", "--seeds=2", "--together")
    assert "run" not in output.partition("\n")[0]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("run huge", ("TABLE", "huge", "is unknown", "use small/digits")),
        ("run small --scale=paper", ("--scale", "paper", "is not a scale of", "use small")),
        ("run small --scale=huge", ("--scale", "huge", "", "use smoke, small or paper")),
        ("run small --cells=lamb,sgd", ("--cells", "sgd", "", "use lamb or adamw")),
        ("run small --carry=/dev/null/x", ("--carry /dev/null/x", ..., "cannot be written")),
        ("run small --runs=/dev/null/x", ("--runs /dev/null/x", ..., "cannot be written")),
        ("run small --config.batch_size=3", ("--config.batch_size", "3", "can change what")),
        ("run small --config.log.every", ("--config.log.every", ..., "has no value")),
        ("list --config.log.every=3", ("--config.log.every=3", ..., "is an option of run, not")),
    ],
)
def test_errors(tmp_path: pathlib.Path, arguments: str, expected: tuple[Any, ...]) -> None:
    write(tmp_path)
    with rejected(*expected):
        call(tmp_path, *arguments.split())
    assert not (tmp_path / "small" / "digits.jsonl").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("run small --seeds=0", "--seeds: 0 is less than 1"),
        ("run small --seeds=1000000000000", "--seeds: 1000000000000 is more than 1,000"),
        ("run small --tune=1", "--tune: 1 is less than 2"),
        ("run small --tune=1000000000", "--tune: 1000000000 is more than 10,000"),
        ("run small --processes=0", "--processes: 0 is less than 1"),
        ("run small --time-limit=2", "--time-limit.*'2'"),
        ("run small --time-limit=0h", "--time-limit.*'0h'"),
        ("run small --budget=soon", "--budget.*'soon'"),
        ("run small --config.log.evry=3", "evry"),
        ("run small --config.log.every=[]", "config.log.every"),
        ("adopt /nowhere", "WORKDIR /nowhere holds no run"),
    ],
)
def test_errors_of_options(tmp_path: pathlib.Path, arguments: str, message: str) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=message):
        call(tmp_path, *arguments.split())
    assert not (tmp_path / "small" / "digits.jsonl").exists()


@pytest.mark.parametrize(
    "flag, file, kind",
    [
        ("--carry", "carried", "a pipe"),
        ("--records", "small/digits.jsonl", "a folder"),
        ("--records", "small/digits.configs.json", "a folder"),
    ],
)
def test_unwritable_files_are_rejected_before_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, flag: str, file: str, kind: str
) -> None:
    write(tmp_path)
    there = tmp_path / "there"
    path = there / file
    path.parent.mkdir(parents=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
        # Do not read the folder as a file of records.
        monkeypatch.setattr(Results, "_read", lambda self: setattr(self, "_records", {}))
        monkeypatch.setattr(Results, "damage", [], raising=False)
    monkeypatch.setattr(running, "train", lambda *_: pytest.fail("it trains"))
    given = f"{flag}={path if flag == '--carry' else there}"
    with rejected(f"{flag} {path}", ..., f"is {kind}, not a file", "give the path of"):
        call(tmp_path, "run", "small", f"--runs={tmp_path / 'runs'}", given)
    assert reading.kind(path) == kind


def test_changed_code_is_rejected_before_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(loading, "folder", lambda: tmp_path)
    monkeypatch.setattr(checkout, "commit", lambda: "0123456789ab+")
    runs = tmp_path / "runs"
    with rejected("*digits.jsonl", ..., "records of committed code", "`run --records=FOLDER`"):
        call(tmp_path, "run", "small", f"--runs={runs}")
    assert not runs.exists()
    assert "2 runs to train" in call(tmp_path, "run", "small", "--seeds=1", "--dry-run")


def test_tables_with_other_numbers_of_devices(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    write(tmp_path, TABLE.replace("seeds = 2", "seeds = 1\ncpu_devices = 8"), "eight")
    with rejected("small/digits and small/eight", ..., "need 1 and 8 CPU devices"):
        call(tmp_path, "run", "small", f"--runs={tmp_path / 'runs'}")
    assert "--cpu-devices=8" in call(tmp_path, "commands", "small/eight", "--scale=small")
    # This process already has eight CPU devices.
    call(tmp_path, "run", "small/eight", f"--runs={tmp_path / 'runs'}", "--cells=lamb")
    records = (tmp_path / "small" / "eight.jsonl").read_text().splitlines()
    assert [json.loads(line)["devices"] for line in records] == [8]


@pytest.mark.long
def test_tuned_form(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    runs = f"--runs={tmp_path / 'runs'}"
    one = ("run", "small", runs, "--seeds=1", "--cells=lamb")
    output = call(tmp_path, *one, "--tune=2")
    assert output.count("lamb-small-search") == 2 * 2  # lines for start and end
    description = "tuned: the best of 2 values of optimizer.learning_rate per cell"
    assert description in output.replace("\n    ", " ")
    # The records of the untuned table do not change.
    assert not table.records.exists() and len(list(Results(tuned(table, 2)))) == 3
    shown = call(tmp_path, "show", "small")
    assert "not run" in shown and "tuned: the best of 2" in shown and "(chosen)" in shown
    assert "small tuned 1 of 3" in call(tmp_path, "list").replace("\n    ", " ")
    # A larger search reuses the runs of the smaller search.
    output = call(tmp_path, *one, "--tune=3", "--dry-run")
    assert "1 runs to train" in output
    with rejected("--tune", 3, "conflicts with the search of 3 value(s) per cell in small"):
        write(tmp_path, TUNED)
        call(tmp_path, "run", "small", runs, "--tune=3")


def test_keys_that_change_no_result(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    free = ("--config.log.tensorboard=False", "--config.checkpoint.every=100 percent")
    runs = f"--runs={tmp_path / 'runs'}"
    call(tmp_path, "run", "small", runs, "--cells=lamb", "--seeds=1", *free)
    (folder,) = (tmp_path / "runs" / "small" / "digits").glob("lamb-small-seed0-*")
    config = json.loads((folder / "config.json").read_text())
    assert config["checkpoint.every"] == "100 percent" and not (folder / "tensorboard").exists()
    # The record belongs to the cell of the table.
    assert "1 of 2 seeds" in call(tmp_path, "show", "small") and len(list(Results(table))) == 1


@pytest.mark.long
def test_budget_and_carry(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace("seeds = 2", "seeds = 2\nminutes = {cpu = 40}")
    table = write(tmp_path, text)
    runs, file = f"--runs={tmp_path / 'runs'}", tmp_path / "out" / "carried.json"
    output = call(tmp_path, "run", "small", runs, "--budget=90m", "--dry-run")
    seeds = "  lamb-small-seed0  about 40 minutes (estimated)\n  adamw-small-seed0"
    assert f"2 runs to train\n{seeds}" in output
    assert "about 1:20:00 in all" in output
    assert "small/digits: 2 more runs do not fit into --budget; use a longer" in output
    mine = f"--records={tmp_path / 'mine'}"
    output = call(tmp_path, "run", "small", runs, mine, "--budget=41m", f"--carry={file}")
    # The record of the first run shows that the other runs take seconds.
    assert output.count("accuracy ") == 4 and f"adopt {file}" in output.replace("\n", "")
    assert not table.records.exists()
    assert call(tmp_path, "adopt", str(file)).count("small/digits: ") == 4
    assert "measured" in call(tmp_path, "show", "small")
    first = Results(table)
    assert call(tmp_path, "run", "small", runs, mine, "--budget=1s").count("run 1") == 0
    (folder,) = (tmp_path / "runs" / "small" / "digits").glob("lamb-small-seed0-*")
    assert json.loads((folder / "config.json").read_text())["checkpoint.every"] == "2 percent"
    assert {record["config"] for record in first} == {
        record["config"] for record in Results(table, tmp_path / "mine")
    }


def start(tmp_path: pathlib.Path, *arguments: str) -> "subprocess.Popen[str]":
    words = ["run", "small", f"--papers={tmp_path}", f"--runs={tmp_path / 'runs'}", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "lamb_tpu.reproduce", *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(process: "subprocess.Popen[str]", text: str) -> bool:
    """Reads the output until a line contains the text; returns False if no line does."""
    assert process.stdout is not None
    return any(text in line for line in process.stdout)


LONG = TABLE.replace("4 steps", "2500 steps").replace("seeds = 2", "seeds = 1")


@pytest.mark.long
def test_two_at_once_and_a_time_limit(tmp_path: pathlib.Path) -> None:
    write(tmp_path, LONG.replace("2500", "500000"))
    first = start(tmp_path, "--time-limit=20s")
    assert wait_for(first, "run 1 of 2")
    second = start(tmp_path)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 2 and "is in use by another process" in output
    assert output.startswith("error: --runs ") and "Traceback" not in output
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 0 and "reached the time limit of 0:20" in output
    (folder,) = (tmp_path / "runs" / "small" / "digits").glob("lamb-*")
    assert list((folder / "checkpoints").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_five_moments_it_ends_as_one_left_alone(
    tmp_path: pathlib.Path, processes: int
) -> None:
    random.seed(processes)
    kills = 0
    rest: dict[str, list[dict]] = {}
    for name in ("alone", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        table = write(
            folder, LONG.replace("overrides = {", 'overrides = {"checkpoint.every" = "100 steps", ')
        )
        for _ in range(5 if name == "killed" else 0):
            process = start(folder, f"--processes={processes}")
            if not wait_for(process, "run 1 of"):
                break  # on a fast machine the command has finished
            time.sleep(random.uniform(0.5, 5.0))
            process.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))
            process.communicate(timeout=60)
            kills += 1
            time.sleep(3.0)  # processes without a parent save and exit
        process = start(folder, f"--processes={processes}")
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        rest[name] = [
            {key: value for key, value in record.items() if key != "seconds"}
            for record in read_records(table.records)
        ]
    assert rest["alone"] == rest["killed"] and len(rest["alone"]) == 2 and kills
