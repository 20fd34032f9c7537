"""The compiler's process: its exit status is passed on, and a crash is told in one sentence."""

import doctest
import signal
import subprocess
import sys
import time

import pytest

from lamb_tpu.plan import guard as guard_lib
from tests import tiny

PROGRAM = "import os, signal, sys, time; from lamb_tpu.plan.guard import guard; guard(); {}"


def guarded(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code)], cwd=tiny.ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "code, status, message",
    [
        ("print('done')", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("os.abort()", 2, "error: the TPU compiler crashed (SIGABRT); change the mesh, config."),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 2, "error: the TPU compiler crashed (SIGSEGV); "),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            2,
            "error: the process with the TPU compiler was "
            "killed, often because the machine has too little",
        ),
        ("os.kill(os.getpid(), signal.SIGPIPE)", 0, ""),  # Python ignores it
    ],
)
def test_how_a_process_ends(code: str, status: int, message: str) -> None:
    done = guarded(code)
    assert done.returncode == status
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == bool(message)
    assert done.stdout == ("done\n" if "done" in code else "")


def test_a_search_goes_on_after_a_crash() -> None:
    code = (
        "import os, sys; from lamb_tpu.plan import guard; guard.guard({})\n"
        "for key in ('a', 'b', 'c'):\n"
        "  print(key, key in guard.crashed, flush=True)\n"
        "  if key not in guard.crashed:\n"
        "    with guard.compiling(key):\n"
        "      key == 'a' or os.abort()\n"
        "guard.crashed == {{'b', 'c'}} or os.abort()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(True)], cwd=tiny.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    first = ["a False", "b False"]
    assert done.stdout.splitlines() == [
        *first,
        "a False",
        "b True",
        "c False",
        "a False",
        "b True",
        "c True",
    ]
    assert len(done.stderr.splitlines()) == 2
    assert all(
        line.endswith("; going on without this program") for line in done.stderr.splitlines()
    )
    alone = subprocess.run(
        [sys.executable, "-c", code.format(False)], cwd=tiny.ROOT, capture_output=True, text=True
    )
    assert alone.returncode == 2 and alone.stdout.splitlines() == first
    assert len(alone.stderr.splitlines()) == 1 and "going on" not in alone.stderr


def test_a_crash_outside_the_compiler_ends_a_search() -> None:
    code = PROGRAM.replace("guard()", "guard(True)").format("os.abort()")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tiny.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


# The parent is late, as on a busy machine.
LATE = "import os, time; fork = os.fork; os.fork = lambda: (c := fork(), c and time.sleep(1))[0]; "


@pytest.mark.parametrize("before", ["", LATE], ids=["at once", "late"])
def test_the_end_is_passed_on(before: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM.format("print(1, flush=True); time.sleep(60)")],
        cwd=tiny.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    began = time.monotonic()
    process.terminate()
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 128 + signal.SIGTERM and time.monotonic() - began < 30


def test_docstrings() -> None:
    assert doctest.testmod(guard_lib) == (0, 1)
