"""SIGTERM is noticed at the next poll."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from lamb_tpu.errors import Preempted
from lamb_tpu.preemption import Preemption
from tests import tiny


def test_notice_ends_the_work_at_the_next_poll_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        preemption.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            preemption.poll()
    assert signal.getsignal(signal.SIGTERM) == before
    with Preemption() as preemption:  # of the next run nobody wants anything
        preemption.poll()


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


def test_second_notice_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, time\n"
        "from lamb_tpu.preemption import Preemption\n"
        "with Preemption():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('goes on', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still there', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tiny.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGTERM and done.stdout == "goes on\n", done.stderr


def test_processes_stop_at_the_same_poll(tmp_path) -> None:
    """The notice comes to process 1 alone; both go at a pace of their own."""
    done = tiny.command(
        "lamb_tpu.launch", "--local", "--processes=2", "--module=tests.job", "--",
        "preempt", str(tmp_path),
    )
    assert done.returncode == os.EX_TEMPFAIL, done.stderr
    assert "preempted; start the same command again to resume" in done.stderr
    first, second = (int((tmp_path / f"{index}.txt").read_text()) for index in (0, 1))
    assert first == second > 10
