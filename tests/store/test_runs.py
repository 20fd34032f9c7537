"""A run's files are read together; a run that is not complete says how far it is."""

import json
import pathlib
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.store import runs
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.workdir import Workdir
from tests import tiny


def fake(folder: pathlib.Path, accuracies: list[float], end: int = 12, **changes: Any) -> None:
    """A workdir of a run that trains 4 updates before each evaluation and has come to `end`."""
    run = Workdir(folder)
    config = tiny.digits(**changes)
    run.check(config)
    run.write_config(config)
    (folder / "run.jsonl").write_text(json.dumps({"device": "cpu", "devices": 2}) + "\n")
    with MetricsWriter(folder, 0, tensorboard=False) as writer:
        for step in range(4, end + 1, 4):
            writer.write(
                step, "train", {"loss": 8.0 / step, "epoch": step / 4, "seconds": 5 * step}
            )
            for accuracy in accuracies[step // 4 - 1 : step // 4]:
                writer.write(
                    step, "eval", {"accuracy": accuracy, "loss": 8.5 / step, "epoch": step / 4}
                )


def test_a_complete_run(tmp_path: pathlib.Path) -> None:
    fake(tmp_path, [0.5, 0.7, 0.6])
    run = runs.read(tmp_path)
    assert run.config["duration"] == "12 steps" and run.unfinished() == ""
    assert [record["accuracy"] for record in run.records("eval")] == [0.5, 0.7, 0.6]
    assert run.receipt() == {"device": "cpu", "devices": 2}
    (tmp_path / "run.jsonl").unlink()
    assert run.receipt() == {}


@pytest.mark.parametrize("duration", ["3.5 epochs", "14 steps", "896 examples"])
def test_a_run_that_goes_on(tmp_path: pathlib.Path, duration: str) -> None:
    fake(tmp_path, [0.5, 0.7, 0.6], duration=duration)
    done = {"epochs": "3", "steps": "12", "examples": "768"}[duration.partition(" ")[2]]
    assert runs.read(tmp_path).unfinished() == f"is at {done} of {duration}"


def test_a_run_before_an_evaluation(tmp_path: pathlib.Path) -> None:
    fake(tmp_path, [0.5])
    assert runs.read(tmp_path).unfinished() == "has no evaluation at its end"


def test_a_run_that_ended_at_its_target_is_complete(tmp_path: pathlib.Path) -> None:
    fake(tmp_path, [0.5], end=4, target__metric="accuracy", target__value=0.4)
    assert runs.read(tmp_path).unfinished() == "is at 4 of 12 steps"
    with MetricsWriter(tmp_path, 4, tensorboard=False) as writer:
        writer.write(4, "target", {"accuracy": 0.5})
    assert runs.read(tmp_path).unfinished() == ""


def test_folders_without_a_run(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="RUN .* holds no run: config.json is missing"):
        runs.read(tmp_path, "RUN")
    (tmp_path / "config.json").write_text('{"seed": 0}')
    with pytest.raises(UserError, match="config.json is of no run, for it has no optimizer.name"):
        runs.read(tmp_path)
    fake(tmp_path / "phase_1", [0.5])
    with pytest.raises(UserError, match="holds the phases phase_1; give the folder of one of them"):
        runs.read(tmp_path)
    (tmp_path / "phase_1" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="there is no .*metrics.jsonl; has the run of RUN begun"):
        runs.read(tmp_path / "phase_1", "RUN")
