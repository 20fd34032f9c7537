"""The command line: what it prints, kills at random moments, and mistakes as one sentence."""

import contextlib
import io
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import __main__ as command
from lamb_tpu.reproduce import loading
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tuning import tuned
from lamb_tpu.store import checkout
from lamb_tpu.store.metrics import read_records
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_jobs import TUNED
from tests.tiny import ROOT


def call(tmp_path: pathlib.Path, *arguments: str) -> str:
    """Runs a command in this process and returns what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command.main(command._parse([*arguments, f"--papers={tmp_path}"]))
    return out.getvalue()


@pytest.mark.long
def test_a_whole_story(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    runs = f"--runs={tmp_path / 'runs'}"
    told = call(tmp_path, "list")
    assert "small/digits  Digits by optimizer\n    Table 9; measured: small 0 of 3" in told
    told = call(tmp_path, "run", "small", runs, "--seeds=1", "--dry-run")
    assert told == "small/digits, small: 2 runs to train\n  lamb-small-seed0\n  adamw-small-seed0\n"
    assert not (tmp_path / "runs").exists()
    told = call(tmp_path, "run", "small/digits", runs, "--seeds=1", "--cells=lamb")
    assert "small/digits: run 1 of 1: lamb-small-seed0" in told and "accuracy " in told
    told = call(tmp_path, "run", "small/digits", runs, "--seeds=1")
    assert "lamb-small" not in told and "run 1 of 1: adamw" in told
    shown = call(tmp_path, "show", "small")
    assert "arXiv:0000.00000, Table 9" in shown and "93.0 (recalled)" in shown
    assert "1 of 2 seeds" in shown and "settings not published" in shown
    assert "2 of 3" in call(tmp_path, "list")
    printed = call(tmp_path, "commands", "small")
    assert printed.count("python -m lamb_tpu.train --config=digits:batch=128,optimizer=") == 2
    told = call(tmp_path, "report", f"--html={tmp_path / 'site'}")
    assert told.split() == [str(tmp_path / "report/README.md"), str(tmp_path / "site/index.html")]
    # The list of all tables stays when one is named.
    (tmp_path / "report/README.md").write_text("all")
    assert str(tmp_path / "report/small-digits.md") in call(tmp_path, "report", "small").split()
    assert (tmp_path / "report/README.md").read_text() == "all"
    # Records of one's own, away from those of the checkout.
    mine = f"--records={tmp_path / 'mine'}"
    before = table.records.read_text()
    told = call(tmp_path, "run", "small", runs, mine, "--cells=lamb", "--seeds=1")
    assert "run 1 of 1: lamb-small-seed0" in told and table.records.read_text() == before
    assert (tmp_path / "mine" / "small" / "digits.jsonl").exists()
    assert call(tmp_path, "show", "small", mine).count("not run") == 1
    told = call(tmp_path, "report", "small", mine, f"--output={tmp_path / 'mine' / 'report'}")
    for name in ("small-digits.md", "small-digits-small-training.svg"):
        assert str(tmp_path / "mine" / "report" / name) in told.splitlines()
    assert all(pathlib.Path(line).exists() for line in told.splitlines())
    assert (
        "| adamw | 92.5 (seen) | - |"
        in (tmp_path / "mine" / "report" / "small-digits.md").read_text()
    )
    # The table changes: its cells are stale and are run again.
    write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    shown = call(tmp_path, "show", "small")
    assert re.search(r"lamb: 1 stale, [\d.]+: duration: '4 steps' there, '5 steps' now", shown)
    assert call(tmp_path, "run", "small", runs, "--seeds=1").count("run 1 of 2") == 1
    assert {r["updates"] for r in Results(table)} == {5}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "huge"], "there is no table 'huge'; known: small/digits"),
        (["run", "small", "--scale=paper"], "--scale is 'paper'; small/digits has: small"),
        (
            ["run", "small", "--scale=huge"],
            "--scale is 'huge'; small/digits has: smoke, small, paper",
        ),
        (["run", "small", "--cells=lamb,sgd"], "--cells has 'sgd'; .* has: lamb, adamw"),
        (["run", "small", "--seeds=0"], "--seeds is 0; it must be at least 1"),
        (["run", "small", "--processes=0"], "--processes is 0; it must be at least 1"),
        (
            ["run", "small", "--time-limit=2"],
            "--time-limit is '2'; give a number above 0 with a unit",
        ),
        (["run", "small", "--time-limit=0h"], "--time-limit is '0h'"),
        (
            ["run", "small", "--budget=soon"],
            "--budget is 'soon'; give a number above 0 with a unit",
        ),
        (["run", "small", "--carry=/dev/null/x"], "--carry /dev/null/x cannot be written"),
        (["run", "small", "--tune=1"], "--tune is 1; it must be at least 2"),
        (["run", "small", "--runs=/dev/null/x"], "--runs /dev/null/x cannot be written"),
        (["adopt", "/nowhere"], "WORKDIR /nowhere holds no run"),
    ],
)
def test_mistakes(tmp_path: pathlib.Path, arguments: list[str], message: str) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=message):
        call(tmp_path, *arguments)
    assert not (tmp_path / "small" / "digits.jsonl").exists()


def test_changed_code_is_rejected_before_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(loading, "folder", lambda: tmp_path)
    monkeypatch.setattr(checkout, "commit", lambda: "0123456789ab+")
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match="committed code only, .*`run --records=FOLDER`"):
        call(tmp_path, "run", "small", f"--runs={runs}")
    assert not runs.exists()
    assert "2 runs to train" in call(tmp_path, "run", "small", "--seeds=1", "--dry-run")


def test_tables_with_other_numbers_of_devices(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    write(tmp_path, TABLE.replace("seeds = 2", "seeds = 1\ncpu_devices = 8"), "eight")
    with pytest.raises(UserError, match=r"small/digits needs 1 CPU device\(s\) and small/eight 8"):
        call(tmp_path, "run", "small", f"--runs={tmp_path / 'runs'}")
    assert "--cpu_devices=8" in call(tmp_path, "commands", "small/eight", "--scale=small")
    # This process has eight already.
    call(tmp_path, "run", "small/eight", f"--runs={tmp_path / 'runs'}", "--cells=lamb")
    records = (tmp_path / "small" / "eight.jsonl").read_text().splitlines()
    assert [json.loads(line)["devices"] for line in records] == [8]


@pytest.mark.long
def test_tuned_form(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    runs = f"--runs={tmp_path / 'runs'}"
    one = ("run", "small", runs, "--seeds=1", "--cells=lamb")
    told = call(tmp_path, *one, "--tune=2")
    assert told.count("lamb-small-search") == 2 * 2  # begun and done
    assert "tuned: the best of 2 values of optimizer.learning_rate for every cell" in told.replace(
        "\n    ", " "
    )
    # The records of the table as it stands are not touched.
    assert not table.records.exists() and len(list(Results(tuned(table, 2)))) == 3
    shown = call(tmp_path, "show", "small")
    assert "not run" in shown and "tuned: the best of 2" in shown and "(chosen)" in shown
    assert "small tuned 1 of 3" in call(tmp_path, "list").replace("\n    ", " ")
    # A larger search goes on where the smaller ended.
    told = call(tmp_path, *one, "--tune=3", "--dry-run")
    assert "1 runs to train" in told
    with pytest.raises(UserError, match="small/digits has a search of its own, of 3 values a cell"):
        write(tmp_path, TUNED)
        call(tmp_path, "run", "small", runs, "--tune=3")


@pytest.mark.long
def test_budget_and_carry(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace("seeds = 2", "seeds = 2\nminutes = {cpu = 40}")
    table = write(tmp_path, text)
    runs, file = f"--runs={tmp_path / 'runs'}", tmp_path / "out" / "carried.json"
    told = call(tmp_path, "run", "small", runs, "--budget=90m", "--dry-run")
    assert "2 runs to train\n  lamb-small-seed0  about 40:00\n  adamw-small-seed0" in told
    assert "about 1:20:00 in all" in told
    assert "small/digits: 2 more runs do not fit into --budget; a longer one, or none" in told
    mine = f"--records={tmp_path / 'mine'}"
    told = call(tmp_path, "run", "small", runs, mine, "--budget=41m", f"--carry={file}")
    # The first run showed that they take seconds.
    assert told.count("accuracy ") == 4 and f"adopt {file}" in told.replace("\n", "")
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
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "lamb_tpu.reproduce",
            "run",
            "small",
            f"--papers={tmp_path}",
            f"--runs={tmp_path / 'runs'}",
            *arguments,
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(process: "subprocess.Popen[str]", text: str) -> bool:
    """Reads lines up to one with the text; False if there is none."""
    assert process.stdout is not None
    return any(text in line for line in process.stdout)


LONG = TABLE.replace("4 steps", "2500 steps").replace("seeds = 2", "seeds = 1")


@pytest.mark.long
def test_two_at_once_and_a_time_limit(tmp_path: pathlib.Path) -> None:
    write(tmp_path, LONG.replace("2500", "500000"))
    first = start(tmp_path, "--time-limit=20s")
    assert wait_for(first, "run 1 of 2")
    second = start(tmp_path)
    told, _ = second.communicate(timeout=120)
    assert second.returncode == 2 and "is in use by another process" in told
    assert told.startswith("error: --runs ") and "Traceback" not in told
    told, _ = first.communicate(timeout=120)
    assert first.returncode == 0 and "the time limit of 0:20 is reached" in told
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
                break  # a fast machine has come to the end
            time.sleep(random.uniform(0.5, 5.0))
            process.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))
            process.communicate(timeout=60)
            kills += 1
            time.sleep(3.0)  # processes without a parent save and end
        process = start(folder, f"--processes={processes}")
        told, _ = process.communicate(timeout=300)
        assert process.returncode == 0, told
        rest[name] = [
            {key: value for key, value in record.items() if key != "seconds"}
            for record in read_records(table.records)
        ]
    assert rest["alone"] == rest["killed"] and len(rest["alone"]) == 2 and kills
