"""Several processes of one run on this machine, none of which outlives the launcher."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lamb_tpu.cluster import signals
from lamb_tpu.launch import local
from lamb_tpu.store.metrics import read_records
from tests import tiny
from tests.raising import rejected


@pytest.fixture(autouse=True)
def _temporary_logs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes the launcher, in this and in other processes, use a temporary folder of pytest."""
    folder = str(tmp_path_factory.mktemp("logs"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


def start(*flags: str, mode: str, folder: pathlib.Path, processes: int = 2) -> subprocess.Popen:
    """Starts the launcher with processes that run a mode of tests/worker.py."""
    return tiny.start(
        "lamb_tpu.launch",
        "local",
        f"--processes={processes}",
        "--module=tests.worker",
        *flags,
        "--",
        mode,
        str(folder),
    )


def finish(process: subprocess.Popen, within: float = 60) -> SimpleNamespace:
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=within)
    finally:
        process.kill()
    seconds = time.monotonic() - began
    return SimpleNamespace(status=process.returncode, out=out, err=err, seconds=seconds)


def alive(folder: pathlib.Path) -> list[int]:
    """Returns the processes registered in the folder that are still running."""
    processes = [int(path.name) for path in folder.iterdir()]
    return [process for process in processes if not tiny.has_ended(process, 0.01)]


def wait_for(folder: pathlib.Path, count: int) -> None:
    """Waits until `count` processes have registered in the folder."""
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_reduce_over_two_processes(tmp_path: pathlib.Path) -> None:
    process = start("--devices-per-process=2", mode="all_reduce", folder=tmp_path)
    done = finish(process)
    assert done.status == 0, done.err
    # The two devices of process 0 contribute 1 each, and those of process 1 contribute 2 each.
    assert "process 0 of 2, 4 devices: 6.0" in done.out
    assert "process 1 of 2" not in done.out
    pattern = done.err.partition("output of the other processes: ")[2].splitlines()[0]
    log = pathlib.Path(pattern.replace("*", "1"))
    assert "process 1 of 2, 4 devices: 6.0" in log.read_text()


def test_one_process_alone(tmp_path: pathlib.Path) -> None:
    done = finish(start("--devices-per-process=3", mode="all_reduce", folder=tmp_path, processes=1))
    assert done.status == 0 and "process 0 of 1, 3 devices: 3.0" in done.out, done.err
    assert "output of the other processes" not in done.err


def test_failure_of_one_ends_all_and_is_shown(tmp_path: pathlib.Path) -> None:
    done = finish(start(mode="fail", folder=tmp_path, processes=3))
    assert done.status == 3
    assert "launch: process 1 ended with status 3" in done.err
    assert "  | line 30\n" in done.err and "  | line 11\n" in done.err
    assert "| line 10\n" not in done.err  # only the last 20 lines are shown
    assert len(list(tmp_path.iterdir())) == 6 and not alive(tmp_path)
    assert "killing" not in done.err and done.seconds < 10  # SIGTERM was enough


def test_the_first_output_belongs_to_this_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(subprocess.Popen):
        """A process that ends before its parent continues."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.wait()

    log = tmp_path / "log"
    log.write_text("earlier\n")
    monkeypatch.setattr(local.subprocess, "Popen", Late)
    process = local._start(1, ["platform"], os.environ, log)
    assert process.log_start == len("earlier\n") < log.stat().st_size


def test_abort_of_another_is_not_the_cause(tmp_path: pathlib.Path) -> None:
    done = finish(start(mode="abort", folder=tmp_path))
    assert done.status == 128 + signal.SIGABRT
    assert "process 1 was ended by SIGABRT" in done.err and "  | the reason\n" in done.err
    assert "0x1 function" not in done.err  # the stack trace is left out

    def ended(index: int, status: int | None) -> local._Process:
        popen = SimpleNamespace(returncode=status, poll=lambda: status, pid=None)
        return local._Process(index, popen, None, 0)

    processes = [ended(0, -signal.SIGABRT), ended(1, None), ended(2, 7), ended(3, 0)]
    assert local._first_failed(processes).index == 2
    assert local._first_failed(processes[:2]).index == 0
    assert local._first_failed(processes[3:]) is None


def test_process_that_ignores_sigterm_is_killed(tmp_path: pathlib.Path) -> None:
    process = start("--grace-seconds=60", mode="stubborn", folder=tmp_path)
    done = finish(process)
    assert done.status == 3
    assert "killing the processes that did not end in time: 0\n" in done.err
    assert not alive(tmp_path)
    assert done.seconds < 12  # after a failure, --grace-seconds does not apply


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_all_processes(tmp_path: pathlib.Path, number: int) -> None:
    process = start(mode="save", folder=tmp_path)
    wait_for(tmp_path, 2)
    process.send_signal(number)
    done = finish(process)
    assert done.status == 40 + number
    name = signal.Signals(number).name
    assert f"saved after {name}" in done.out and f"launch: {name}: the processes have" in done.err
    assert not alive(tmp_path)


@pytest.mark.long
def test_preempted_processes_may_save(tmp_path: pathlib.Path) -> None:
    """Preempted processes have more time than processes whose peer failed."""
    done = finish(start(mode="preempted", folder=tmp_path))
    assert done.status == os.EX_TEMPFAIL and done.seconds > 4
    assert "launch: preempted; start the same command again to resume" in done.err
    assert "killing" not in done.err and "ended with status" not in done.err


def test_preempted_before_handlers_are_installed(tmp_path: pathlib.Path) -> None:
    process = start(mode="fail", folder=tmp_path, processes=1)
    wait_for(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.status == os.EX_TEMPFAIL and "launch: preempted; start" in done.err


def test_a_failure_outranks_a_preemption(tmp_path: pathlib.Path) -> None:
    done = finish(start(mode="fail_at_the_end", folder=tmp_path))
    assert done.status == 3 and "process 1 ended with status 3" in done.err


def test_processes_are_killed_after_the_grace_time(tmp_path: pathlib.Path) -> None:
    process = start("--grace-seconds=1", mode="deaf", folder=tmp_path)
    wait_for(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    done = finish(process, within=20)
    assert done.status == 128 + signal.SIGKILL
    assert "killing the processes that did not end in time: 0, 1\n" in done.err
    assert not alive(tmp_path)


def test_second_ctrl_c_kills(tmp_path: pathlib.Path) -> None:
    process = start("--grace-seconds=600", mode="deaf", folder=tmp_path)
    wait_for(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = finish(process, within=20)
    assert done.status == 128 + signal.SIGKILL and not alive(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can bind a process to its parent")
def test_killed_launcher_leaves_no_process(tmp_path: pathlib.Path) -> None:
    process = start(mode="deaf", folder=tmp_path)
    wait_for(tmp_path, 2)
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + 5
    while alive(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("receiver", ["all", "compiling", "waiting"])
def test_a_signal_before_the_first_save(
    tmp_path: pathlib.Path, number: signal.Signals, status: int, receiver: str
) -> None:
    """One process compiles and the other waits; after a signal, both end soon and without an error."""
    process = tiny.start(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        "--module=tests.deaf",
        "--",
        f"--folder={tmp_path}",
    )
    wait_for(tmp_path, 2)
    time.sleep(1)
    if receiver == "all":
        process.send_signal(number)
    else:
        os.kill(of_process(process.pid, 0 if receiver == "compiling" else 1), number)
    done = finish(process)
    # A process without a signal learns of the preemption from the process that received the signal.
    assert done.status in (status, os.EX_TEMPFAIL), done.err
    assert receiver != "all" or done.status == status
    assert done.seconds < 25 and "killing" not in done.err and "Traceback" not in done.err
    assert not alive(tmp_path)


def of_process(launcher: int, index: int) -> int:
    for child in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = pathlib.Path(f"/proc/{child}/environ").read_text().split("\0")
        if f"JAX_PROCESS_ID={index}" in environment:
            return int(child)
    raise AssertionError("no child of the launcher has this JAX_PROCESS_ID")


@pytest.mark.long
def test_a_process_exits_without_waiting_for_others(tmp_path: pathlib.Path) -> None:
    """A process leaves at once with its status; a normal exit would wait until JAX aborts the process."""
    done = finish(start(mode="leave", folder=tmp_path))
    assert done.status == 3 and "  | the reason\n" in done.err
    assert not alive(tmp_path)


@pytest.mark.long
def test_stopped_process_ends_the_others(tmp_path: pathlib.Path) -> None:
    done = finish(start(mode="stop", folder=tmp_path))
    assert done.status == signals.LOST_PEER
    assert f"process 0 ended with status {signals.LOST_PEER}; its output is above" in done.err
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in done.err
    assert not alive(tmp_path)


def test_hanging_process_ends_the_others(tmp_path: pathlib.Path) -> None:
    done = finish(start(mode="hang", folder=tmp_path))
    assert done.status == 1
    assert "has made no progress in 2 s since update 7" in done.err
    assert not alive(tmp_path)


def test_log_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    expected = two / "logs"
    assert local._log_folder([f"--workdir={one}", f"-workdir={two}"]) == expected
    assert local._log_folder(["--config", "c.py", "--workdir", str(two), "x"]) == expected
    assert expected.is_dir() and not one.exists()
    assert local._log_folder([f"--config.workdir={one}"]).is_dir() and not one.exists()
    monkeypatch.chdir(tmp_path)
    assert local._log_folder(["--workdir=gs://bucket/run"]).is_dir()
    assert not (tmp_path / "gs:").exists()


@pytest.mark.long
def test_two_processes_train_like_one(tmp_path: pathlib.Path) -> None:
    """Compares metrics and parameters of 12 updates on four devices in one and in two processes."""
    arguments = [
        "--config=configs/digits.py:smoke",
        "--config.duration=12 steps",
        "--config.log.every=1 steps",
        "--config.eval.every=6 steps",
        "--config.log.tensorboard=false",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    launched = tiny.start(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        "--devices-per-process=2",
        "--",
        *arguments,
        f"--workdir={two}",
    )
    done = finish(launched, within=120)
    assert done.status == 0, done.err
    assert "over 4 cpu device(s) in 2 process(es)" in done.out
    single = tiny.command("lamb_tpu.train", *arguments, f"--workdir={one}", devices=4)
    assert single.returncode == 0, single.stderr
    assert "accuracy" not in (two / "logs" / "process-1.log").read_text()

    def records(workdir: pathlib.Path, kind: str) -> list[dict]:
        lines = read_records(workdir / "metrics.jsonl", kind)
        return [tiny.untimed(line) | {"kind": 0} for line in lines]

    for kind, count in (("train", 12), ("eval", 2)):
        expected = records(one, kind)
        assert len(expected) == count
        for actual, wanted in zip(records(two, kind), expected, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config("smoke")
    config.duration, config.eval.every = "12 steps", "6 steps"
    (state, _), (reference, _) = (tiny.restored(config, workdir) for workdir in (two, one))
    actual, wanted = tiny.arrays(state), tiny.arrays(reference)
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(float(np.max(np.abs(value.astype(np.float64)))), 1e-30)
        difference = np.max(np.abs(actual[name].astype(np.float64) - value)) / scale
        assert difference < 5e-6, name


@pytest.mark.long
def test_an_error_in_a_config_is_reported_once(tmp_path: pathlib.Path) -> None:
    """The error occurs in both processes after they have connected; neither waits for the other."""
    done = tiny.command(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        "--devices-per-process=2",
        "--",
        "--config=configs/digits.py",
        "--config.batch_size=37",
        f"--workdir={tmp_path}",
    )
    assert done.returncode == 2
    assert "error: config.batch_size=37 is not divisible" in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_check_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_memory", lambda: 2**30)
    local.check_memory(4, 8)
    with rejected("--processes", 5, "needs at least 1 GiB (0.25 GiB for each", "use at most 4"):
        local.check_memory(5, 1)
