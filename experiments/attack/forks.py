"""Runs commands in forks of one process that has already imported their modules.

A new Python process needs two seconds for its imports; a fork needs no time for them. The parent has
imported JAX but has started no backend, so forking is safe.
"""

import gc
import importlib
import os
import pathlib
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from experiments.attack.outcome import HANG, LEFT, MEMORY, End

CPU_SECONDS, IDLE_SECONDS, LEFT_SECONDS = 40.0, 25.0, 2.0
MEMORY_BYTES = 4 * 2**30
_CLOSED = "http://127.0.0.1:9"  # a port on which nothing listens; replaces the network
_IMPORTED = (
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "lamb_tpu.cli",
    "lamb_tpu.overrides",
    "lamb_tpu.run.phases",
    "lamb_tpu.run.weights",
    "lamb_tpu.store.checkpoint",
    "lamb_tpu.watch.best",
    "lamb_tpu.watch.progress",
    "lamb_tpu.watch.observers",
    "lamb_tpu.run.session",
    "lamb_tpu.run.updating",
    "lamb_tpu.reproduce.running",
    "lamb_tpu.reproduce.showing",
    "lamb_tpu.reproduce.adopting",
    "lamb_tpu.reproduce.report.site",
    "lamb_tpu.reproduce.trials",
    "lamb_tpu.plan.making",
    "lamb_tpu.plan.page",
    "lamb_tpu.plan.curves",
    "lamb_tpu.plan.largest",
    "lamb_tpu.plan.fastest",
    "lamb_tpu.launch.local",
    "lamb_tpu.launch.remote",
    "lamb_tpu.launch.jobset",
    "lamb_tpu.launch.slurm",
    "lamb_tpu.critical_batch.measuring",
    "lamb_tpu.data.images.source",
    "lamb_tpu.data.text.preparation",
    "lamb_tpu.models.bert_huggingface",
    "safetensors.numpy",
    "tokenizers",
    "rich.progress",
    "tensorboardX",
)


class Command(NamedTuple):
    """A command to run.

    Attributes:
      module: name of the module, as for `python -m`.
      arguments: the command's arguments.
      folder: the working directory, the only folder to which the command should write.
      environment: variables to set.
      setting: function that is called in the child process before the command.
      signals: a signal to send to the command, and the seconds from the start to the signal.
      cpu_seconds: CPU time after which the command counts as hung.
    """

    module: str
    arguments: Sequence[str]
    folder: pathlib.Path
    environment: Mapping[str, str]
    setting: Callable[[], None] | None = None
    signals: tuple[int, float] | None = None
    cpu_seconds: float = CPU_SECONDS


class _Running(NamedTuple):
    number: int
    command: Command
    began: float
    progress: list[
        float
    ]  # CPU time, when it last grew, when it was last read, and 1 once the signal is sent


def warm() -> None:
    """Imports what the commands import, but not the commands themselves, which run as `__main__`."""
    for name in _IMPORTED:
        importlib.import_module(name)
    # Garbage collection in a fork would copy the memory pages of all imported modules.
    gc.collect()
    gc.freeze()


def run(commands: Iterable[Command], jobs: int) -> Iterator[tuple[int, End] | Command]:
    """Yields each command's number and end when the command ends.

    In a child process, the last item is the `Command` that the child must run. The caller must pass it
    to `become` at module level, outside any function, so that the interpreter shuts down as after
    `python -m`.
    """
    running: dict[int, _Running] = {}
    waiting = iter(enumerate(commands))
    upcoming = next(waiting, None)
    while running or upcoming is not None:
        while upcoming is not None and len(running) < jobs:
            number, command = upcoming
            sys.stdout.flush()
            child = os.fork()
            if not child:
                _enter(command)
                yield command
                raise AssertionError("a forked process must pass its command to `become`")
            now = time.monotonic()
            running[child] = _Running(number, command, now, [0.0, now, now, 0.0])
            upcoming = next(waiting, None)
        time.sleep(0.02)
        for child in list(running):
            if (end := _look(child, running[child])) is not None:
                yield running.pop(child).number, end


def become(command: Command) -> NoReturn:
    """Runs a command in this process, as `python -m` does."""
    import runpy

    if command.setting is not None:
        command.setting()
    if any(name.startswith("JAX_") for name in command.environment):
        # JAX reads these variables when it is imported, and this process has already imported JAX.
        words = [sys.executable, "-m", command.module, *command.arguments]
        os.execv(sys.executable, words)
    sys.argv = [f"{command.module.replace('.', '/')}.py", *command.arguments]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    sys.exit()


def _enter(command: Command) -> None:
    os.setsid()
    # A shell starts background jobs with SIGINT ignored; restore the handler, which the command inherits.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(command.folder)
    home = command.folder.parent / "home"
    home.mkdir(exist_ok=True)
    for name in [name for name in os.environ if name.startswith(("JAX_", "TPU_", "LAMB_TPU_"))]:
        if name != "JAX_COMPILATION_CACHE_DIR":
            del os.environ[name]
    os.environ.update(
        {
            "HOME": str(home),
            "TMPDIR": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_PLATFORMS": "cpu",
            "STORAGE_EMULATOR_HOST": _CLOSED,
            "http_proxy": _CLOSED,
            "https_proxy": _CLOSED,
            "COLUMNS": "80",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **command.environment,
        }
    )
    import tempfile

    tempfile.tempdir = None
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "out"), (2, "err")):
        with (command.folder.parent / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Limit the file size: endless output must not fill the disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**31, 2**31))


def _look(child: int, running: _Running) -> End | None:
    """Returns the end of a command, or None if it is still running within its limits."""
    ended, status = os.waitpid(child, os.WNOHANG)
    now, seconds = time.monotonic(), time.monotonic() - running.began
    if ended:
        left = _wait_for_session(child)
        return _end(running, os.waitstatus_to_exitcode(status), seconds, LEFT if left else "")
    if running.command.signals is not None and not running.progress[3]:
        number, after = running.command.signals
        if seconds >= after:
            running.progress[3] = 1.0
            os.kill(child, number)
    if now - running.progress[2] < 0.5:
        return None
    running.progress[2] = now
    used, resident = _usage(child)
    if used > running.progress[0]:
        running.progress[:2] = used, now
    stopped = ""
    if resident > MEMORY_BYTES:
        stopped = MEMORY
    elif used > running.command.cpu_seconds or now - running.progress[1] > IDLE_SECONDS:
        stopped = HANG
    if not stopped:
        return None
    _kill_session(child)
    _, status = os.waitpid(child, 0)
    return _end(running, os.waitstatus_to_exitcode(status), seconds, stopped)


def _end(running: _Running, status: int, seconds: float, stopped: str) -> End:
    out, err = (
        (running.command.folder.parent / name).read_bytes()[:1_000_000].decode(errors="replace")
        for name in ("out", "err")
    )
    return End(status, out, err, seconds, stopped)


def _session(leader: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the ID of each process of a session, and the fields of its `stat` file after the name."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            yield int(path.name), fields


def _usage(leader: int) -> tuple[float, int]:
    """Returns the total CPU seconds and resident bytes of a session's processes."""
    processes = [fields for _, fields in _session(leader)]
    ticks = sum(sum(map(int, fields[11:15])) for fields in processes)
    pages = sum(int(fields[21]) for fields in processes)
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def _wait_for_session(leader: int) -> bool:
    """Gives a session's processes two seconds to end, kills the rest, and returns whether it killed any."""
    deadline = time.monotonic() + LEFT_SECONDS
    while any(fields[0] != "Z" for _, fields in _session(leader)):
        if time.monotonic() > deadline:
            _kill_session(leader)
            return True
        time.sleep(0.05)
    return False


def _kill_session(leader: int) -> None:
    for process, _ in _session(leader):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
