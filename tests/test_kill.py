"""Tests that a run equals an undisturbed run, bit for bit, if signals end it and it is resumed."""

import os
import pathlib
import re
import signal
import time
from collections.abc import Callable

import pytest

from lamb_tpu.store.metrics import read_records
from tests import tiny

# tests/test_resume.py and test_train.py end and resume a run in `make test`.
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
    """Starts the run and sends it a signal as soon as the condition holds; returns stdout and stderr."""
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
    """Returns the workdirs of an undisturbed run and of a run ended four times, and the second run's output.

    The output is a list with stdout for each start of the second run, but with stderr for the start
    that SIGTERM ends, and with both for the start that Ctrl-C ends.
    """
    full, killed = (tmp_path_factory.mktemp(name) for name in ("full", "killed"))
    tiny.succeed("lamb_tpu.train", *ARGUMENTS, f"--workdir={full}")
    checkpoints = killed / "checkpoints"

    def between_saves() -> bool:
        return last_logged(killed) >= 67

    def in_a_save() -> bool:
        return last_logged(killed) >= 200 and any(checkpoints.glob("*.orbax-checkpoint-tmp*"))

    def is_set_up() -> bool:
        start = killed / "run.jsonl"
        return start.exists() and start.read_text().endswith("\n")  # it is created empty

    # The signal arrives during compilation, before the first update, or shortly after that update.
    printed = [kill_when(killed, is_set_up, signal.SIGTERM)[1]]
    printed.append(kill_when(killed, between_saves)[0])
    assert checkpoints.is_dir()
    printed.append(kill_when(killed, in_a_save)[0])
    printed += kill_when(killed, lambda: last_logged(killed) >= 268, signal.SIGINT)
    last = tiny.succeed("lamb_tpu.train", *ARGUMENTS, f"--workdir={killed}")
    assert "Traceback" not in last.stderr
    return full, killed, [*printed, last.stdout]


def test_each_start_resumes_from_a_checkpoint(workdirs) -> None:
    _, killed, (early, first, second, third, late, fourth) = workdirs
    # Before the session begins, the signal ends the process without a save.
    ends = r" at update (\d+), saved| before the first update|; nothing that was saved is lost"
    end = re.fullmatch(rf"preempted(?:{ends}).*\n", early)
    assert end is not None, early
    saved = f"resumed from the checkpoint of update {end[1]}\n"
    assert (saved in first) == (end[1] is not None)
    resumed = [
        int(text.partition("resumed from the checkpoint of update ")[2].split()[0])
        for text in (second, third, fourth)
    ]
    assert 0 < resumed[0] <= 67 + 15 and 150 <= resumed[1] < 400
    assert all(step % 15 == 0 for step in resumed[:2])
    # After Ctrl-C, nothing is lost.
    output, ended = late.splitlines()
    assert output == "Ctrl-C: the run saves and ends; press Ctrl-C again to end it at once"
    assert resumed[2] >= 268 and ended.startswith(f"interrupted at update {resumed[2]}, saved; st")
    assert len((killed / "run.jsonl").read_text().splitlines()) == 5
    assert not list((killed / "checkpoints").glob("*tmp*"))


def test_final_state_is_that_of_the_uninterrupted_run(workdirs) -> None:
    full, killed, _ = workdirs
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config("batch=32")
    config.duration, config.eval.every = "400 steps", "50 steps"
    tiny.same_state(config, killed, full)
    state, position = tiny.restored(config, killed)
    assert int(state.step) == 400 and position["loader"]["examples"] == 400 * 32


def test_metrics_are_those_of_the_uninterrupted_run(workdirs) -> None:
    full, killed, _ = workdirs

    def records(workdir: pathlib.Path, kind: str) -> list[dict]:
        return [tiny.untimed(record) for record in read_records(workdir / "metrics.jsonl", kind)]

    assert len(records(full, "eval")) == 8
    assert records(killed, "eval") == records(full, "eval")
    assert records(killed, "train") == records(full, "train")
    assert [record["step"] for record in records(full, "train")] == list(range(5, 401, 5))
    seconds = [record["seconds"] for record in read_records(killed / "metrics.jsonl", "train")]
    assert seconds == sorted(seconds)
