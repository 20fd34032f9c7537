"""Tests that runs that are killed at random moments end with the results of undisturbed runs."""

import itertools
import os
import pathlib
import random
import signal
import sys
from collections.abc import Iterator

import pytest

from lamb_tpu.store.metrics import read_records
from tests import faults, tiny
from tests.faults import Kill, Start

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the launcher's processes are found in /proc"
)

TERM, KILL = signal.SIGTERM, signal.SIGKILL
SIGNALS = [(TERM, 1), (KILL, 0), (TERM, "all"), (KILL, "all"), (TERM, 0), (KILL, 1)]
KILLS_IN_A_RUN = 4


@pytest.fixture(scope="module", autouse=True)
def each_run_compiles() -> Iterator[None]:
    """Turns off the tests' compilation cache, because users' runs compile again after a kill."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        yield


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Start]:
    workdir = tmp_path_factory.mktemp("full")
    start = faults.run(workdir)
    assert start.status == 0, start.printed
    return workdir, start


def check_kill(workdir: pathlib.Path, kill: Kill, start: Start) -> None:
    """Asserts that no finished checkpoint is lost, and that SIGTERM loses no update at all."""
    assert not faults.lost(workdir, start.finished), start
    assert "Traceback" not in start.printed, start.printed
    if kill.number == KILL:
        # A process that has already ended cannot be killed; its work was complete.
        left = start.status == 0 and faults.STEPS in start.finished
        assert left or start.status not in (0, os.EX_TEMPFAIL), start
        return
    if start.status == 0:  # the signal came too late to preempt the run
        assert max(faults.checkpoints(workdir)) == faults.STEPS
        return
    assert start.status == os.EX_TEMPFAIL, start
    assert "launch: preempted; start the same command again to resume" in start.printed
    saved = max(faults.checkpoints(workdir), default=0)
    assert saved >= start.last, start
    if saved > max(start.finished, default=0):
        assert f"preempted at update {saved}, saved" in start.printed, start


def check_complete(workdir: pathlib.Path, full: pathlib.Path) -> None:
    recipe = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py")
    config = tiny.change(
        recipe.get_config("optimizer=lamb,batch=32"),
        {
            "duration": f"{faults.STEPS} steps",
            "eval.every": f"{faults.EVAL_EVERY} steps",
            "eval.batch_size": 8,
        },
    )
    (expected, position), (actual, actual_position) = (
        tiny.restored(config, folder) for folder in (full, workdir)
    )
    assert int(actual.step) == faults.STEPS
    tiny.assert_equal(actual, expected)
    # If the last evaluation was interrupted, the last checkpoint was saved before this evaluation.
    excepted = {"seconds": 0, "startup": 0, "starts": 0}
    excepted |= {"eval_due": 0, "best": 0, "records": 0} if actual_position["eval_due"] else {}
    assert actual_position | excepted == position | excepted
    expected, actual = (
        [tiny.untimed(record) for record in read_records(folder / "metrics.jsonl")]
        for folder in (full, workdir)
    )
    assert actual == expected
    # Preempted runs have also saved at other updates, so check only the permanent and best checkpoints.
    for_good = range(faults.KEEP_EVERY, faults.STEPS + 1, faults.KEEP_EVERY)
    kept, there = {*for_good, position["best"]["step"]}, faults.checkpoints(workdir)
    assert kept <= there and len(there) <= len(kept) + faults.KEEP
    assert not list((workdir / "checkpoints").glob("*tmp*"))


def ordeal(count: int, seed: int, tmp_path: pathlib.Path, full: tuple[pathlib.Path, Start]) -> None:
    """Kills runs `count` times in all, each at most `KILLS_IN_A_RUN` times, and completes every run."""
    generator = random.Random(seed)
    reference, uninterrupted = full
    print(
        f"\nuninterrupted: {uninterrupted.seconds:.1f} s\n\n"
        "| signal to | after, s | at | status | had begun at | next one resumes from |\n"
        "|---|--:|---|--:|--:|--:|"
    )
    signals, killed = itertools.cycle(SIGNALS), 0
    for number in itertools.count():
        workdir = tmp_path / str(number)
        row = ""
        for kills_left in reversed(range(KILLS_IN_A_RUN + 1)):
            kill = None
            if kills_left and killed < count:
                kill = Kill(*next(signals), generator.uniform(0, uninterrupted.seconds))
            start = faults.run(workdir, kill)
            if row:
                print(f"{row} {start.resumed_from} |")
            if start.moment:
                check_kill(workdir, kill, start)
                killed += 1
                row = (
                    f"| {kill.number.name} {kill.target} | {kill.delay:.1f} | {start.moment} | "
                    f"{start.status} | {start.resumed_from} |"
                )
                continue
            assert start.status == 0, start.printed
            check_complete(workdir, reference)
            break
        if killed == count:
            return


@pytest.mark.long
def test_killed_at_a_few_moments(tmp_path: pathlib.Path, full) -> None:
    ordeal(4, 1, tmp_path, full)


@pytest.mark.long
def test_killed_at_many_moments(tmp_path: pathlib.Path, full) -> None:
    ordeal(20, 2, tmp_path, full)
