"""Reading the files of a run, and the progress of an incomplete run."""

import json
import pathlib
from typing import Any

import pytest

from lamb_tpu.store import runs
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.workdir import Workdir
from tests import tiny
from tests.raising import rejected


def fake(folder: pathlib.Path, accuracies: list[float], end: int = 12, **changes: Any) -> None:
    """Writes the workdir of a run at update `end`; `accuracies` come from evaluations every 4 updates."""
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


@pytest.mark.parametrize("duration", ["12 steps", "768 examples", "3 epochs"])
def test_progress_with_a_changing_batch_counts_examples(
    tmp_path: pathlib.Path, duration: str
) -> None:
    fake(tmp_path, [], end=0, duration=duration)  # steps of 64 examples
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        for step, examples in ((4, 256), (6, 768)):
            counts = {"epoch": examples / 256, "examples": examples, "seconds": 1.0 * step}
            writer.write(step, "train", {"loss": 1.0, **counts})
            writer.write(step, "eval", {"accuracy": 0.5, "epoch": examples / 256})
            done = {"steps": 4, "examples": 256, "epochs": 1}[duration.partition(" ")[2]]
            expected = "" if step == 6 else f"is at {done} of {duration}"
            assert runs.read(tmp_path).unfinished() == expected


def test_an_end_in_tenths_of_an_epoch(tmp_path: pathlib.Path) -> None:
    fake(tmp_path, [], end=0, duration="0.3 epochs")
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        for kind in ("train", "eval"):
            writer.write(3, kind, {"loss": 1.0, "epoch": 192 / 640, "seconds": 1.0})
    assert runs.read(tmp_path).unfinished() == ""


@pytest.mark.parametrize("duration", ["soon", "50 percent"])
def test_a_damaged_duration(tmp_path: pathlib.Path, duration: str) -> None:
    fake(tmp_path, [0.5, 0.5, 0.5], duration=duration)
    with rejected(f"duration in {tmp_path / 'config.json'}", problem=duration):
        runs.read(tmp_path).unfinished()


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
    with rejected(f"RUN {tmp_path}", problem="holds no run: config.json is missing"):
        runs.read(tmp_path, "RUN")
    (tmp_path / "config.json").write_text('{"seed": 0}')
    with rejected(tmp_path / "config.json", problem="has no optimizer.name, so it is not"):
        runs.read(tmp_path)
    fake(tmp_path / "phase_1", [0.5])
    with rejected(f"--workdir {tmp_path}", problem="holds the phases phase_1"):
        runs.read(tmp_path)
    (tmp_path / "phase_1" / "metrics.jsonl").unlink()
    with rejected("*metrics.jsonl", problem="does not exist", remedy="or give another RUN"):
        runs.read(tmp_path / "phase_1", "RUN")
