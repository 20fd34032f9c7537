"""Tests that child processes end with their parent, and that a signal ends a library call at once."""

import signal
import subprocess
import sys

import pytest

from lamb_tpu.cluster import children
from tests import tiny

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
EXECUTED = (
    "import subprocess, sys, time; from lamb_tpu.cluster import children\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}], stdout=subprocess.PIPE, "
    "preexec_fn=children.following())\n"
    "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
)
FORKED = (
    "import os, time; from lamb_tpu.cluster import children\n{change}\n"
    "parent = os.getpid()\n"
    "if not (child := os.fork()):\n"
    "    children.follow_parent(parent)\n"
    "    print(os.getpid(), flush=True)\n"
    "time.sleep(60)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "code",
    [EXECUTED, FORKED.format(change=""), FORKED.format(change="children._prctl = None")],
    ids=["executed", "forked", "elsewhere"],
)
def test_a_killed_parent_leaves_no_child(code: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tiny.ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert tiny.has_ended(child, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_parent_that_ended_before_is_noticed() -> None:
    code = "from lamb_tpu.cluster import children; children.follow_parent(1 << 22); print('on')"
    done = tiny.python(code)
    assert done.returncode == -signal.SIGKILL and done.stdout == ""


def test_signals_have_their_default_action_in_a_library() -> None:
    code = (
        "import signal, time, hashlib; from lamb_tpu.cluster import children\n"
        "signal.signal(signal.SIGTERM, print)\n"
        "with children.default_signals():\n"
        "    print('up', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tiny.ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with children.default_signals():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == before[0]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_all_code_that_starts_a_process_binds_it_to_its_parent() -> None:
    """Code that starts a process must use `children`, or be listed here with a reason."""
    short = {
        "store/checkout.py": "git, for at most 10 s",
        "launch/local_steps.py": "git, for a moment",
        "attack/forks.py": "a child for each bad input, with limits of time and memory",
        "launch/steps.py": "commands of the user's, which may be creating machines",
        "cluster/distributed.py": "the relay, which ends with its pipe",
    }
    actual = {}
    for folder in ("lamb_tpu", "experiments"):
        for path in (tiny.ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if any(
                word in text
                for word in (
                    "subprocess.run(",
                    "subprocess.Popen(",
                    "os.fork()",
                    "ProcessPoolExecutor(",
                    'get_context("spawn")',
                )
            ):
                actual[str(path.relative_to(tiny.ROOT / folder))] = "children." in text
    assert {name for name, binds in actual.items() if not binds} == set(short)
    assert len(actual) > len(short) + 4
