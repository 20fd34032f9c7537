"""Runs that are killed at random moments end as those left alone."""

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
    """The user's case: a run that was killed while it compiled does so again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Start]:
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("whole")
    start = faults.run(workdir)
    assert start.status == 0, start.printed
    return workdir, start


def check_kill(workdir: pathlib.Path, kill: Kill, start: Start) -> None:
    """Nothing that was finished is lost, and after SIGTERM nothing at all."""
    assert not faults.lost(workdir, start.finished), start
    assert "Traceback" not in start.printed, start.printed
    if kill.number == KILL:
        # A process that has already left cannot be killed; its work was finished then.
        left = start.status == 0 and faults.STEPS in start.finished
        assert left or start.status not in (0, os.EX_TEMPFAIL), start
        return
    if start.status == 0:  # it was past the last moment at which it can be preempted
        assert max(faults.checkpoints(workdir)) == faults.STEPS
        return
    assert start.status == os.EX_TEMPFAIL, start
    assert "launch: preempted; start the same command again to resume" in start.printed
    saved = max(faults.checkpoints(workdir), default=0)
    assert saved >= start.last, start
    if saved > max(start.finished, default=0):
        assert f"preempted at update {saved}, saved" in start.printed, start


def check_complete(workdir: pathlib.Path, whole: pathlib.Path) -> None:
    """State, data position and records are those of the uninterrupted run, bit for bit."""
    recipe = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py")
    config = tiny.change(
        recipe.get_config("optimizer=lamb,batch=32"),
        {
            "duration": f"{faults.STEPS} steps",
            "eval.every": f"{faults.EVAL_EVERY} steps",
            "eval.batch_size": 8,
        },
    )
    (expected, position), (found, position_found) = (
        tiny.restored(config, folder) for folder in (whole, workdir)
    )
    assert int(found.step) == faults.STEPS
    tiny.assert_equal(found, expected)
    # Where the last evaluation was broken off, the state is that from before it.
    excepted = {"seconds": 0, "startup": 0, "starts": 0}
    excepted |= {"eval_due": 0, "best": 0} if position_found["eval_due"] else {}
    assert position_found | excepted == position | excepted
    expected, found = (
        [tiny.untimed(record) for record in read_records(folder / "metrics.jsonl")]
        for folder in (whole, workdir)
    )
    assert found == expected
    # Preempted runs have saved at other updates too, so of the newest only one is the same.
    for_good = range(faults.KEEP_EVERY, faults.STEPS + 1, faults.KEEP_EVERY)
    kept, there = {*for_good, position["best"]["step"]}, faults.checkpoints(workdir)
    assert kept <= there and len(there) <= len(kept) + faults.KEEP
    assert not list((workdir / "checkpoints").glob("*tmp*"))


def ordeal(
    count: int, seed: int, tmp_path: pathlib.Path, whole: tuple[pathlib.Path, Start]
) -> None:
    """Kills runs `count` times, a few times each, and brings each to its end."""
    generator = random.Random(seed)
    reference, uninterrupted = whole
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
def test_killed_at_a_few_moments(tmp_path: pathlib.Path, whole) -> None:
    ordeal(4, 1, tmp_path, whole)


@pytest.mark.long
def test_killed_at_many_moments(tmp_path: pathlib.Path, whole) -> None:
    ordeal(20, 2, tmp_path, whole)
