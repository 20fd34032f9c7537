"""Tests that each failure of a run's disk ends the run with a message, and that saved files remain.

`make test-storage` runs these tests and prints a table.
"""

import json
import os
import pathlib
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from lamb_tpu.store.metrics import read_records
from tests import disks, tiny
from tests.disks import STEPS, End, Run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="limits and mounts are Linux'"),
]

ROWS: list[str] = []
FULL, READ_ONLY = "No space left on device", "Read-only file system"


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    print(
        "\n\n| attack | status | s | lines of errors | it says | checkpoints left |\n"
        "|---|--:|--:|--:|---|---|\n" + "\n".join(ROWS)
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("full")
    disks.run(workdir).check(0)
    return workdir


def note(attack: str, end: End, workdir: pathlib.Path) -> None:
    left = ", ".join(map(str, sorted(disks.checkpoints(workdir)))) or "-"
    last = (end.err or end.out).splitlines()[-1] if end.err or end.out else ""
    said = (end.errors or [last])[-1].replace(str(workdir), "DIR")
    ROWS.append(
        f"| {attack} | {end.status} | {end.seconds:.1f} | {len(end.err.splitlines())} | {said} | "
        f"{left} |"
    )


def check_equal(workdir: pathlib.Path, full: pathlib.Path) -> None:
    assert max(disks.checkpoints(workdir)) == STEPS
    arguments = dict(item[9:].split("=", 1) for item in disks.ARGUMENTS[1:])
    recipe = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py")
    config = recipe.get_config("optimizer=lamb,batch=32")
    config.model.hidden_sizes, config.duration = (600, 600), arguments["duration"]
    config.eval.every = arguments["eval.every"]
    tiny.assert_equal(*(tiny.restored(config, folder)[0] for folder in (workdir, full)))
    actual, expected = (
        [tiny.untimed(record) for record in read_records(folder / "metrics.jsonl")]
        for folder in (workdir, full)
    )
    assert actual == expected


def finished(workdir: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in workdir.glob("checkpoints/*") if path.name.isdecimal()]


def has_saved(run: Run, count: int = 1) -> Callable[[], bool]:
    return lambda: len(list(run.workdir.glob("checkpoints/*/sha256.json"))) >= count


def test_full_disk(tmp_path: pathlib.Path, full: pathlib.Path) -> None:
    with disks.disk(tmp_path / "disk") as disk:
        workdir = disk.path / "run"
        end = disks.run(workdir).check(2)
        note("the disk becomes full", end, workdir)
        assert FULL in end.errors[0]
        safe = disks.checkpoints(workdir)
        assert safe and disks.reported_safe(end) == max(safe)
        # The files of the failed save are removed, so that they take no space.
        assert not list(workdir.glob("checkpoints/*tmp*"))
        disk.remount("size=200m")
        end = disks.run(workdir).check(0)
        note("... the same command, with more space", end, workdir)
        assert f"resumed from the checkpoint of update {max(safe)}\n" in end.out
        assert safe <= disks.checkpoints(workdir)
        check_equal(workdir, full)


def test_full_disk_of_two_processes(tmp_path: pathlib.Path, full: pathlib.Path) -> None:
    with disks.disk(tmp_path / "disk") as disk:
        workdir = disk.path / "run"
        end = disks.run(workdir, processes=2)
        note("the disk becomes full, two processes", end, workdir)
        assert end.status == 2 and len(end.errors) == 1 and "Traceback" not in end.err, end.err
        assert FULL in end.errors[0] and end.seconds < 60
        safe = disks.checkpoints(workdir)
        assert safe and disks.reported_safe(end) == max(safe)
        # The other process ended with the same error.
        log = (workdir / "logs" / "process-1.log").read_text()
        assert FULL in log and "Traceback" not in log, log
        disk.remount("size=200m")
        end = disks.run(workdir, processes=2)
        assert end.status == 0, end.err
        note("... the same command, with more space", end, workdir)
        assert max(disks.checkpoints(workdir)) == STEPS


@pytest.mark.parametrize("leaving", [0, 16384])
def test_full_disk_from_the_start(tmp_path: pathlib.Path, leaving: int) -> None:
    with disks.disk(tmp_path / "disk") as disk:
        workdir = disk.path / "run"
        workdir.mkdir()
        filling = disk.fill(leaving)
        end = disks.run(workdir).check(2)
        note(f"the disk has {leaving} bytes", end, workdir)
        assert FULL in end.errors[0] and (leaving or "first update" not in end.out)
        filling.unlink()
        disks.run(workdir, "--config.checkpoint.keep=1").check(0)


def test_disk_without_space_for_a_record(tmp_path: pathlib.Path, full: pathlib.Path) -> None:
    with disks.disk(tmp_path / "disk", "size=60m") as disk:
        workdir = disk.path / "run"
        (workdir / "checkpoints").mkdir(parents=True)
        with disks.disk(workdir / "checkpoints", "size=200m"):
            run = Run(workdir)
            run.until((workdir / "metrics.jsonl").exists)
            disk.fill()
            end = run.end().check(2)
            note("metrics.jsonl has no space", end, workdir)
            assert f"metrics.jsonl cannot be written ({FULL})" in end.errors[0]
            (disk.path / "filling").unlink()
            disks.run(workdir).check(0)
            check_equal(workdir, full)


def test_limit_on_the_size_of_files(tmp_path: pathlib.Path) -> None:
    end = disks.run(tmp_path, limits=[(resource.RLIMIT_FSIZE, 2**20)]).check(2)
    note("files may have 1 MiB", end, tmp_path)
    assert "File too large" in end.errors[0] and not disks.checkpoints(tmp_path)


def test_read_only_from_the_start(tmp_path: pathlib.Path) -> None:
    with disks.disk(tmp_path / "checkpoints", "ro"):
        end = disks.run(tmp_path).check(2)
        note("the checkpoints' folder is read-only", end, tmp_path)
        assert READ_ONLY in end.errors[0] and "first update" not in end.out


@pytest.mark.parametrize("processes", [1, 2])
def test_read_only_in_mid_run(tmp_path: pathlib.Path, processes: int) -> None:
    (tmp_path / "checkpoints").mkdir()
    long = "--config.duration=3000 steps"
    with disks.disk(tmp_path / "checkpoints", "size=200m") as disk:
        run = Run(tmp_path, long, processes=processes)
        run.until(has_saved(run, 2))

        def is_read_only() -> bool:
            try:
                disk.remount("ro")
            except Exception:  # busy, because a file is being written
                return False
            return True

        run.until(is_read_only)
        safe = disks.checkpoints(tmp_path)
        end = run.end()
        note(f"the checkpoints become read-only, {processes} process(es)", end, tmp_path)
        assert end.status == 2 and len(end.errors) == 1 and "Traceback" not in end.err, end.err
        assert READ_ONLY in end.errors[0] and disks.reported_safe(end) == max(safe)
        assert disks.checkpoints(tmp_path) == safe
        disk.remount("rw")
        run = Run(tmp_path, long, processes=processes)
        run.until(lambda: has_saved(run)() and max(disks.checkpoints(tmp_path)) > max(safe))
        run.popen.send_signal(signal.SIGTERM)
        assert run.end().status == os.EX_TEMPFAIL


@pytest.mark.parametrize(
    "name, processes",
    [("", 1), ("checkpoints", 1), ("metrics.jsonl", 1), ("", 2), ("checkpoints", 2)],
)
def test_deleted_in_mid_run(tmp_path: pathlib.Path, name: str, processes: int) -> None:
    workdir = tmp_path / "run"
    run = Run(workdir, "--config.duration=3000 steps", processes=processes)
    run.until(has_saved(run))
    # Rename before deleting, so that no save writes into the folder meanwhile.
    (workdir / name).rename(tmp_path / "gone")
    if (tmp_path / "gone").is_dir():
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    end = run.end()
    note(f"{name or 'the workdir'} is deleted, {processes} process(es)", end, workdir)
    assert end.status == 2 and len(end.errors) == 1 and "Traceback" not in end.err, end.err
    assert "no longer exists" in end.errors[0] or "moved, replaced or deleted" in end.errors[0]


def test_deleted_just_before_the_end(tmp_path: pathlib.Path) -> None:
    """The run would write its only checkpoint and its only record at its end, after the deletion."""
    workdir = tmp_path / "run"
    run = Run(
        workdir,
        "--config.duration=300 steps",
        "--config.checkpoint.every=300 steps",
        "--config.eval.every=300 steps",
        "--config.log.every=300 steps",
    )
    run.until((workdir / "metrics.jsonl").exists)
    workdir.rename(tmp_path / "gone")
    end = run.end().check(2)
    note("the workdir is deleted, before anything is saved", end, workdir)


@pytest.mark.parametrize("saves, processes", [(25, 1), (300, 1), (300, 2)])
def test_many_saves_under_a_low_limit(tmp_path: pathlib.Path, saves: int, processes: int) -> None:
    end = disks.run(
        tmp_path,
        f"--config.duration={saves} steps",
        "--config.checkpoint.every=1 steps",
        "--config.checkpoint.keep=1",
        "--config.model.hidden_sizes=(16,)",
        "--config.eval.every=1000 steps",
        processes=processes,
        limits=[(resource.RLIMIT_NOFILE, 80)],
    )
    note(f"{saves} saves under ulimit -n 80, {processes} process(es)", end, tmp_path)
    assert end.status == 0 and not end.errors, end.err
    assert disks.checkpoints(tmp_path) == {saves}


def test_killed_in_mid_save(tmp_path: pathlib.Path, full: pathlib.Path) -> None:
    for number in range(1, 4):
        run = Run(tmp_path)
        before = disks.checkpoints(tmp_path)
        run.until(lambda: len(finished(tmp_path)) > len(before))
        run.until(lambda: any(tmp_path.glob("checkpoints/*tmp*")))
        run.popen.kill()
        end = run.end()
        assert before < disks.checkpoints(tmp_path)
        note(f"kill -9 in a save, {number}", end, tmp_path)
    end = disks.run(tmp_path).check(0)
    note("... the same command", end, tmp_path)
    check_equal(tmp_path, full)
    assert not list(tmp_path.glob("checkpoints/*tmp*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_brackets_in_the_path(tmp_path: pathlib.Path, full: pathlib.Path, processes: int) -> None:
    workdir = tmp_path / "lr[0.1] *?" / "run"
    run = Run(workdir, processes=processes)
    run.until(has_saved(run, 2))
    run.popen.send_signal(signal.SIGTERM)
    end = run.end()
    assert end.status == os.EX_TEMPFAIL or STEPS in disks.checkpoints(workdir), end.err
    end = disks.run(workdir, processes=processes)
    assert end.status == 0 and "Traceback" not in end.err, end.err
    note(f"[ ] * ? in the path, {processes} process(es)", end, workdir)
    if processes == 1:
        assert {20, 40, 60} <= disks.checkpoints(workdir)
        metrics = json.loads(disks.run(workdir, module="lamb_tpu.evaluate").check(0).out)
        shown = read_records(full / "metrics.jsonl", "eval")[-1]
        assert metrics["accuracy"] == shown["accuracy"]


def test_evaluation_of_a_run_that_may_only_be_read(
    tmp_path: pathlib.Path, full: pathlib.Path
) -> None:
    shown = read_records(full / "metrics.jsonl", "eval")[-1]
    with disks.disk(tmp_path / "disk", "size=100m") as disk:
        workdir = disk.path / "run"
        shutil.copytree(full, workdir)
        disk.remount("ro")
        end = disks.run(workdir, module="lamb_tpu.evaluate").check(0)
        note("evaluate a run that may only be read", end, workdir)
        assert json.loads(end.out)["accuracy"] == shown["accuracy"]
        end = disks.run(workdir).check(2)
        note("train it", end, workdir)
        assert READ_ONLY in end.errors[0]
