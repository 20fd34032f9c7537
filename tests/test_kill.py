"""A run ended by SIGKILL, SIGTERM and Ctrl-C ends as one left alone: bit for bit on one machine."""

import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from lamb_tpu.store.metrics import read_records
from tests import tiny

# tests/test_resume.py and test_train.py have a run that is ended and resumed in `make test`.
pytestmark = pytest.mark.long

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


def kill_when(
    workdir: pathlib.Path, condition: Callable[[], bool], number: int = signal.SIGKILL
) -> tuple[str, str]:
    """Starts the run, kills it as soon as the condition holds; what it printed, and as errors."""
    process = tiny.start("lamb_tpu.train", *ARGUMENTS, f"--workdir={workdir}")
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    statuses = {signal.SIGKILL: -9, signal.SIGTERM: os.EX_TEMPFAIL, signal.SIGINT: 130}
    assert process.returncode == statuses[number], err
    return out, err


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path, list]:
    """An uninterrupted run, one killed four times, and what that printed, start by start.

    Of the starts ended by SIGTERM and by Ctrl-C there is what they told as an error.
    """
    whole, killed = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    done = tiny.command("lamb_tpu.train", *ARGUMENTS, f"--workdir={whole}")
    assert done.returncode == 0, done.stderr
    checkpoints = killed / "checkpoints"

    def between_saves() -> bool:
        return last_logged(killed) >= 67

    def in_a_save() -> bool:
        return last_logged(killed) >= 200 and any(checkpoints.glob("*.orbax-checkpoint-tmp*"))

    def is_set_up() -> bool:
        return (killed / "run.jsonl").exists()

    # While it compiles: before the first update, or after it.
    printed = [kill_when(killed, is_set_up, signal.SIGTERM)[1]]
    printed.append(kill_when(killed, between_saves)[0])
    assert checkpoints.is_dir()
    printed.append(kill_when(killed, in_a_save)[0])
    printed += kill_when(killed, lambda: last_logged(killed) >= 268, signal.SIGINT)
    last: subprocess.CompletedProcess = tiny.command(
        "lamb_tpu.train", *ARGUMENTS, f"--workdir={killed}"
    )
    assert last.returncode == 0, last.stderr
    assert "Traceback" not in last.stderr
    return whole, killed, [*printed, last.stdout]


def test_each_start_resumes_from_a_checkpoint(workdirs) -> None:
    _, killed, (early, first, second, third, late, fourth) = workdirs
    update = re.fullmatch(r"preempted (at update 1, saved|before the first update); .*\n", early)[1]
    assert ("resumed from the checkpoint of update 1\n" in first) == update.startswith("at")
    resumed = [
        int(text.partition("resumed from the checkpoint of update ")[2].split()[0])
        for text in (second, third, fourth)
    ]
    assert 0 < resumed[0] <= 67 + 15 and 150 <= resumed[1] < 400
    assert all(step % 15 == 0 for step in resumed[:2])
    # Nothing is lost.
    told, ended = late.splitlines()
    assert told == "Ctrl-C: saving, then ending; again to end at once"
    assert resumed[2] >= 268 and ended.startswith(f"interrupted at update {resumed[2]}, saved; st")
    assert len((killed / "run.jsonl").read_text().splitlines()) == 5
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
    assert position_found["loader"]["examples"] == 400 * 32


def test_metrics_are_those_of_the_uninterrupted_run(workdirs) -> None:
    whole, killed, _ = workdirs

    def records(workdir: pathlib.Path, kind: str) -> list[dict]:
        return [tiny.untimed(record) for record in read_records(workdir / "metrics.jsonl", kind)]

    assert len(records(whole, "eval")) == 8
    assert records(killed, "eval") == records(whole, "eval")
    assert records(killed, "train") == records(whole, "train")
    assert [record["step"] for record in records(whole, "train")] == list(range(5, 401, 5))
    seconds = [record["seconds"] for record in read_records(killed / "metrics.jsonl", "train")]
    assert seconds == sorted(seconds)
