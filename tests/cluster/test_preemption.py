"""SIGTERM, Ctrl-C and a failed write take effect at the next poll."""

import os
import signal
import subprocess
import threading

import pytest

from lamb_tpu.cluster import signals as signals_lib
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.errors import Interrupted, Preempted, UserError
from tests import tiny


@pytest.mark.parametrize(
    "number, raised",
    [(signal.SIGTERM, Preempted), (signal.SIGINT, Interrupted), (signal.SIGHUP, Preempted)],
)
def test_notice_ends_the_work_at_the_next_poll_only(
    number: int, raised: type[BaseException], capsys: pytest.CaptureFixture
) -> None:
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before, wakeup = [signal.getsignal(one) for one in signals], signal.set_wakeup_fd(-1)
    earlier = threading.enumerate()  # on a busy machine, a watcher briefly outlives its run
    with Preemption() as preemption:
        preemption.poll()
        (watcher,) = [
            thread
            for thread in threading.enumerate()
            if thread.name == "signals" and thread not in earlier
        ]
        os.kill(os.getpid(), number)
        with pytest.raises(Preempted) as error:
            preemption.poll()
        assert error.type is raised
    output = "Ctrl-C: the run saves and ends; press Ctrl-C again to end it at once\n"
    assert capsys.readouterr().err == (output if number == signal.SIGINT else "")
    assert [signal.getsignal(one) for one in signals] == before
    assert signal.set_wakeup_fd(wakeup) == -1
    watcher.join(timeout=10)
    assert not watcher.is_alive()
    with Preemption() as preemption:  # the signal does not end the next run
        preemption.poll()


def test_handlers_of_the_command_serve_until_there_is_something_to_save() -> None:
    def ends(number: int, frame: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, ends)
    try:
        with Preemption(begins=False) as preemption:
            preemption.poll()
            assert signal.getsignal(signal.SIGTERM) == ends and not signals_lib.saving.is_set()
            for _ in range(2):
                preemption.begin()
                assert signal.getsignal(signal.SIGTERM) != ends and signals_lib.saving.is_set()
        assert signal.getsignal(signal.SIGTERM) == ends and not signals_lib.saving.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
    with Preemption(begins=False):  # no command has set a handler
        assert callable(signal.getsignal(signal.SIGTERM))


def test_failure_ends_the_work_at_the_next_poll() -> None:
    with Preemption() as preemption:
        preemption.poll()
        preemption.settle()
        for text in ("the first", "the second"):
            preemption.fail(UserError(text))
        with pytest.raises(UserError, match="^the first$"):
            preemption.poll()
        with pytest.raises(UserError, match="^the first$"):
            preemption.settle()


def test_other_threads_have_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    raised = []

    def work() -> None:
        try:
            with Preemption() as preemption:
                preemption.poll()
                assert signal.getsignal(signal.SIGTERM) == before
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not raised


def run(*lines: str) -> subprocess.CompletedProcess:
    code = "import os, signal, threading, time\nfrom lamb_tpu.cluster.preemption import Preemption"
    return tiny.python("\n".join([code, *lines]))


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_second_notice_ends_the_process_at_once(first: str, second: str) -> None:
    done = run(
        "with Preemption():",
        f"    os.kill(os.getpid(), signal.{first})",
        "    print('goes on', flush=True)",
        f"    os.kill(os.getpid(), signal.{second})",
        "    print('still there', flush=True)",
    )
    assert done.returncode == -signal.Signals[second] and done.stdout == "goes on\n", done.stderr


def test_second_ctrl_c_ends_a_main_thread_that_is_deaf() -> None:
    """The test simulates a compilation with a library call, during which Python runs no signal handlers."""
    done = run(
        "def send():",
        "    for _ in range(2):",
        "        time.sleep(0.5)",
        "        os.kill(os.getpid(), signal.SIGINT)",
        "threading.Thread(target=send, daemon=True).start()",
        "with Preemption():",
        "    import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",  # takes half an hour
    )
    assert done.returncode == 128 + signal.SIGINT and done.stdout == "", done


@pytest.mark.long
@pytest.mark.parametrize(
    "mode, status, output",
    [
        ("preempt", os.EX_TEMPFAIL, "launch: preempted; start the same command again to resume"),
        ("interrupt", 130, "launch: interrupted; start the same command again to resume"),
        ("fail", 2, "error: process 1: its disk is full\n"),
    ],
)
def test_processes_stop_at_the_same_poll(tmp_path, mode: str, status: int, output: str) -> None:
    """Only process 1 gets the signal; the processes poll at different speeds."""
    done = tiny.command(
        "lamb_tpu.launch", "local", "--processes=2", "--module=tests.job", "--", mode, str(tmp_path)
    )
    assert done.returncode == status, done.stderr
    assert output in done.stderr
    first, second = (int((tmp_path / f"{index}.txt").read_text()) for index in (0, 1))
    assert first == second > 10
