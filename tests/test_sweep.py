"""Tests the sweep command: its files, its errors, and resuming after kills at random moments."""

import json
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest

from lamb_tpu.store.metrics import read_records
from tests import tiny
from tests.reproduce.test_running import wait_for

COMMAND = ("lamb_tpu.sweep", "--config=digits:batch=128")
RATE = "--search=optimizer.learning_rate=log(1e-3,1e-1)"


def sweep(folder: pathlib.Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return tiny.command(*COMMAND, f"--workdir={folder}", "--config.duration=4 steps", *arguments)


@pytest.mark.long
def test_sweep_and_resume(tmp_path: pathlib.Path) -> None:
    done = sweep(tmp_path, RATE, "--trials=2")
    assert done.returncode == 0 and "run 2 of 2: trial-001-sweep-seed0" in done.stdout
    expected = {".lock", "sweep", "sweep.jsonl", "sweep.configs.json", "sweep.md", "sweep.png"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    first = read_records(tmp_path / "sweep.jsonl")
    assert [record["cell"] for record in first] == ["trial-000", "trial-001"]
    best = max(first, key=lambda record: record["values"]["accuracy"])
    *_, command = done.stdout.splitlines()
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "lamb_tpu.train", "--config=digits:batch=128"]
    (config,) = json.loads((tmp_path / "sweep.configs.json").read_text())[best["config"]]
    assert f"--config.optimizer.learning_rate={config['optimizer.learning_rate']}" in words
    assert command in (tmp_path / "sweep.md").read_text()
    # One more trial keeps the first two.
    done = sweep(tmp_path, RATE, "--trials=3", "--dry-run")
    assert done.returncode == 0 and done.stdout.endswith("\n1 runs to train\n")
    assert read_records(tmp_path / "sweep.jsonl") == first
    done = sweep(tmp_path, RATE, "--trials=2", "--seed=1")
    assert done.returncode == 2 and "holds another sweep (trial-000: " in done.stderr
    (tmp_path / "config.json").touch()
    done = sweep(tmp_path, RATE, "--trials=2")
    assert done.returncode == 2 and "holds a run; give another folder" in done.stderr


@pytest.mark.long
def test_an_error_is_one_sentence(tmp_path: pathlib.Path) -> None:
    done = sweep(tmp_path / "x", RATE, "--trials=2", "--time-limit=2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: --time-limit")
    assert not (tmp_path / "x").exists()


@pytest.mark.long
def test_killed_at_five_moments_it_ends_as_one_left_alone(tmp_path: pathlib.Path) -> None:
    random.seed(0)
    kills = 0
    rest: dict[str, list[dict]] = {}
    for name in ("alone", "killed"):
        folder = tmp_path / name

        def start() -> "subprocess.Popen[str]":
            return subprocess.Popen(
                [sys.executable, "-m", *COMMAND, f"--workdir={folder}", RATE, "--trials=2",
                 "--config.duration=2000 steps", "--config.checkpoint.every=100 steps"],
                cwd=tiny.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip

        for number in range(5 if name == "killed" else 0):
            process = start()
            if not wait_for(process, "run 1 of"):
                break  # on a fast machine, the command has already finished
            time.sleep(random.uniform(0.5, 3.0))
            process.send_signal((signal.SIGKILL, signal.SIGTERM)[number % 2])
            process.communicate(timeout=60)
            kills += 1
        output, _ = (process := start()).communicate(timeout=300)
        assert process.returncode == 0, output
        rest[name] = [
            {key: value for key, value in record.items() if key != "seconds"}
            for record in read_records(folder / "sweep.jsonl")
        ]
    assert rest["alone"] == rest["killed"] and len(rest["alone"]) == 2 and kills > 1
    configs = [(tmp_path / name / "sweep.configs.json").read_text() for name in rest]
    assert configs[0] == configs[1]
