"""Runs commands in forks of one process that has already imported the packages of the commands.

Starting Python and JAX takes almost two seconds of CPU time per command. `run` sends a command to a
server: a child of the test process, which forks for each command. `python -m tests.commands FILE`
reads a list of [module, argument, ...] from FILE, runs each item as `python -m module argument ...`
and replaces the list with a list of {status, stdout, stderr, seconds, processor_seconds}.
"""

import atexit
import functools
import gc
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
from typing import Any

SECONDS = 60.0  # limit for a command in FILE, after which it is killed
ROOT = pathlib.Path(__file__).resolve().parent.parent
# Environment variables that Python, JAX and XLA read when they start.
_EARLY = ("JAX_", "LANG", "LC_", "LD_", "MALLOC", "NPROC", "PJRT", "PYTHON", "TPU_", "XLA_")
# A command sets its number of devices after JAX has started.
_DEVICES = "JAX_NUM_CPU_DEVICES"

# CPU seconds of the commands that `run` has run.
spent = 0.0


def early(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables, except the number of devices, that must be set before a process starts."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_EARLY) and name != _DEVICES
    }


class Server:
    """A process that forks for each command."""

    def __init__(self, environment: dict[str, str]):
        self.early = early(environment)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.commands"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.process.kill)

    def run(self, line: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([line, environment, seconds]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@functools.cache
def _server() -> Server:
    return Server(dict(os.environ))


def run(line: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any] | None:
    """Runs [module, argument, ...] in the root folder; returns None if the command needs a new process.

    A new process is needed if an environment variable that Python, JAX or XLA reads when it starts
    differs from the server's value.
    """
    global spent
    server = _server()
    if server.early != early(environment):
        return None
    outcome = server.run(line, environment, seconds)
    spent += outcome["processor_seconds"]
    return outcome


def _forked(line: list[str], seconds: float) -> dict[str, Any] | None:
    """Forks; the parent waits for the child and returns the child's outcome, and the child returns None."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            return None
        ended, status = 0, 0
        while not ended and time.monotonic() - began < seconds:
            time.sleep(0.02)
            ended, status, usage = os.wait4(child, os.WNOHANG)
        if not ended:
            os.kill(child, 9)
            _, status, usage = os.wait4(child, 0)
        out.seek(0)
        err.seek(0)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "stdout": out.read().decode(errors="replace"),
            "stderr": err.read().decode(errors="replace"),
            "seconds": time.monotonic() - began,
            "processor_seconds": usage.ru_utime + usage.ru_stime,
        }


def _run_file(path: pathlib.Path) -> list[str] | None:
    """Forks for each command in a file; a child returns its command, and the parent returns None."""
    actual = []
    for line in json.loads(path.read_text()):
        outcome = _forked(line, SECONDS)
        if outcome is None:
            return line
        actual.append(outcome)
    path.write_text(json.dumps(actual))
    return None


def _serve() -> list[str] | None:
    """Forks for each command from standard input; a child returns its command."""
    while text := sys.stdin.readline():
        line, environment, seconds = json.loads(text)
        outcome = _forked(line, seconds)
        if outcome is None:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.clear()
            os.environ.update(environment)
            import jax

            jax.config.update("jax_num_cpu_devices", int(environment[_DEVICES]))
            return line
        print(json.dumps(outcome), flush=True)
    return None


if __name__ == "__main__":
    # Import the packages that commands use, but no command's module: it will run as `__main__`.
    import matplotlib.figure

    import lamb_tpu.cli
    import lamb_tpu.overrides
    import lamb_tpu.run.phases
    import lamb_tpu.run.weights
    import lamb_tpu.store.checkpoint
    import lamb_tpu.watch.best
    import lamb_tpu.watch.progress

    # Otherwise the garbage collector of a fork would traverse, and so copy, all imported modules. In a
    # short command, this would take most of the time.
    gc.collect()
    gc.freeze()
    line = _run_file(pathlib.Path(sys.argv[1])) if sys.argv[1:] else _serve()
    if line is not None:
        sys.argv = [f"{line[0].replace('.', '/')}.py", *line[1:]]
        runpy.run_module(line[0], run_name="__main__", alter_sys=True)
