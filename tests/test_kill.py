"""A run killed by SIGKILL, twice, ends as one that was left alone: bit for bit on one machine."""

import pathlib
import subprocess
import time
from collections.abc import Callable

import pytest

from lamb_tpu.metrics import read_records
from tests import tiny

ARGUMENTS = [
    "--config=configs/digits.py:optimizer=lamb,batch=32",
    "--config.duration=400 steps",
    "--config.checkpoint.every=15 steps",
    "--config.eval.every=50 steps",
    "--config.log.every=5 steps",
    "--config.log.tensorboard=false",
]


def last_logged(workdir: pathlib.Path) -> int:
    metrics = workdir / "metrics.jsonl"
    return read_records(metrics)[-1]["step"] if metrics.exists() and metrics.stat().st_size else 0


def kill_when(workdir: pathlib.Path, condition: Callable[[], bool]) -> str:
    """Starts the run, kills it as soon as the condition holds, and returns what it printed."""
    process = tiny.start("lamb_tpu.train", *ARGUMENTS, f"--workdir={workdir}")
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    out, _ = process.communicate()
    assert process.returncode == -9
    return out


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path, list]:
    """An uninterrupted run, one killed twice, and what the latter printed, start by start."""
    whole, killed = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    done = tiny.command("lamb_tpu.train", *ARGUMENTS, f"--workdir={whole}")
    assert done.returncode == 0, done.stderr
    checkpoints = killed / "checkpoints"

    def between_saves() -> bool:
        return last_logged(killed) >= 67

    def in_a_save() -> bool:
        return last_logged(killed) >= 200 and any(checkpoints.glob("*.orbax-checkpoint-tmp*"))

    printed = [kill_when(killed, between_saves)]
    assert checkpoints.is_dir()
    printed.append(kill_when(killed, in_a_save))
    last: subprocess.CompletedProcess = tiny.command(
        "lamb_tpu.train", *ARGUMENTS, f"--workdir={killed}"
    )
    assert last.returncode == 0, last.stderr
    assert "Traceback" not in last.stderr
    return whole, killed, [*printed, last.stdout]


def test_each_start_resumes_from_a_checkpoint(workdirs) -> None:
    _, killed, (first, second, third) = workdirs
    assert "resumed" not in first
    resumed = [
        int(text.partition("resumed from the checkpoint of update ")[2].split()[0])
        for text in (second, third)
    ]
    assert 0 < resumed[0] <= 67 + 15 and 150 <= resumed[1] < 400
    assert all(step % 15 == 0 for step in resumed)
    assert len((killed / "run.jsonl").read_text().splitlines()) == 3
    assert not list((killed / "checkpoints").glob("*tmp*"))


def test_final_state_is_that_of_the_uninterrupted_run(workdirs) -> None:
    whole, killed, _ = workdirs
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config("batch=32")
    config.duration, config.eval.every = "400 steps", "50 steps"
    (expected, position), (found, position_found) = (
        tiny.restored(config, workdir) for workdir in (whole, killed)
    )
    assert int(found.step) == 400
    tiny.assert_equal(found, expected)
    assert position_found["loader"] == position["loader"]
    assert position_found["loader"]["next_batch"] == 400


def test_metrics_are_those_of_the_uninterrupted_run(workdirs) -> None:
    whole, killed, _ = workdirs

    def records(workdir: pathlib.Path, kind: str) -> list[dict]:
        found = read_records(workdir / "metrics.jsonl", kind)
        return [{**record, "seconds": None} for record in found]

    assert len(records(whole, "eval")) == 8
    assert records(killed, "eval") == records(whole, "eval")
    assert records(killed, "train") == records(whole, "train")
    assert [record["step"] for record in records(whole, "train")] == list(range(5, 401, 5))
    seconds = [record["seconds"] for record in read_records(killed / "metrics.jsonl", "train")]
    assert seconds == sorted(seconds)
