"""The child process that runs the compiler: exit status, one-line report of a crash, signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import tiny

PROGRAM = "import os, signal, sys, time; from lamb_tpu.plan.guard import guard; guard(); {}"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tiny.ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "code, status, message",
    [
        ("print('done')", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("os.abort()", 2, "error: the TPU compiler crashed (SIGABRT); change the mesh, config."),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            2,
            "error: the TPU compiler crashed (SIGSEGV); this "
            "is a fault of libtpu and not of the config: ",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            2,
            "error: the process with the TPU compiler was "
            "killed, often because the machine has too little",
        ),
        ("os.kill(os.getpid(), signal.SIGPIPE)", 0, ""),  # Python ignores SIGPIPE
    ],
)
def test_endings_of_the_child(code: str, status: int, message: str) -> None:
    done = run(PROGRAM.format(code))
    assert done.returncode == status
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == bool(message)
    assert done.stdout == ("done\n" if "done" in code else "")


def test_a_search_continues_after_a_crash() -> None:
    code = (
        "import os, sys; from lamb_tpu.plan import guard; guard.guard({})\n"
        "for key in ('a', 'b', 'c'):\n"
        "  print(key, key in guard.crashed, flush=True)\n"
        "  if key not in guard.crashed:\n"
        "    with guard.compiling(key):\n"
        "      key == 'a' or os.abort()\n"
        "guard.crashed == {{'b', 'c'}} or os.abort()"
    )
    done = run(code.format(True))
    assert done.returncode == 0
    first = ["a False", "b False"]
    rest = "a False,b True,c False,a False,b True,c True"
    assert done.stdout.splitlines() == [*first, *rest.split(",")]
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("; continuing without this program") for line in lines)
    alone = run(code.format(False))
    assert alone.returncode == 2 and alone.stdout.splitlines() == first
    assert len(alone.stderr.splitlines()) == 1 and "continuing" not in alone.stderr


def test_a_crash_outside_the_compiler_ends_a_search() -> None:
    code = PROGRAM.replace("guard()", "guard(True)").format("os.abort()")
    done = run(code)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


# Delays the parent after the fork, as may happen on a busy machine.
LATE = "import os, time; fork = os.fork; os.fork = lambda: (c := fork(), c and time.sleep(1))[0]; "


def start(code: str, **options: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tiny.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("before", ["", LATE], ids=["at once", "late"])
def test_sigterm_is_passed_on(before: str) -> None:
    process = start(before + PROGRAM.format("print(1, flush=True); time.sleep(60)"))
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    began = time.monotonic()
    process.terminate()
    line = "preempted; nothing that was saved is lost, start the same command again\n"
    assert process.communicate(timeout=30) == ("", line)
    assert process.returncode == os.EX_TEMPFAIL and time.monotonic() - began < 30


# A child inside native code, like the compiler, where Python cannot call signal handlers.
IN_COMPILER = (
    "import hashlib; from lamb_tpu.plan import guard as lib; "
    "signal.signal(signal.SIGTERM, print); context = lib.compiling('key'); context.__enter__(); "
    "print(os.getpid(), flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
)
# A child that ignores signals.
STUBBORN = (
    "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; "
    "print(os.getpid(), flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("code", [IN_COMPILER, STUBBORN], ids=["compiler", "stubborn"])
@pytest.mark.parametrize(
    "number, to_group, status",
    [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 75)],
)
def test_a_signal_ends_the_compiler(
    code: str, number: signal.Signals, to_group: bool, status: int
) -> None:
    process = start(PROGRAM.format(code), start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    began = time.monotonic()
    (os.killpg if to_group else os.kill)(process.pid, number)
    try:
        _, output = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # else the child computes for minutes
        raise
    assert process.returncode == status and time.monotonic() - began < 10  # 2 s on an idle machine
    assert output.count("\n") == 1 and "nothing that was saved is lost" in output
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, as does the TPU compiler")
def test_a_kill_ends_the_compiler_too() -> None:
    process = start(PROGRAM.format(STUBBORN))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert tiny.has_ended(child, 10)
