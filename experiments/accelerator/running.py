"""Runs the parts, the most valuable first, each in a process with a time limit; needs only Python.

`OUT` receives at most these files. If the program is killed, they have all completed measurements:

    report.jsonl         a line for each part: how it ended, and how long it took
    measurements.jsonl   a line for each number that `check`, `bert` and `speed` measure
    mnist.json, cifar10_jpeg.json   records for `reproduce adopt`
    log.txt              output of the parts; the middle of a long log is left out
"""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, NamedTuple

from lamb_tpu.cluster import children
from lamb_tpu.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]
MINUTES = 9.0  # total time for which the seconds in `PARTS` are chosen
# Keys that do not change results. A run that takes seconds needs no checkpoint before its end, and
# updates that take milliseconds are sent to the device 50 at a time.
FREE = (
    "--config.log.tensorboard=False",
    "--config.checkpoint.every=100 percent",
    "--config.loop.updates_per_call=50",
    "--config.log.every=50 steps",
)
# Fractions of the time that are reserved: at the end for copying results, and in a part for saving.
_RESERVE, _GRACE = 0.02, 0.01
_LOG_BYTES = 2**20  # limit of each part's log


class Part(NamedTuple):
    """A part of the program.

    Attributes:
      name: the part's name in the report.
      seconds: time limit if the total time is `MINUTES`; later parts get the time that is left unused.
      module: the module that the part runs.
      arguments, small: the module's arguments in a full run and in a test on a CPU, with the
        placeholders `data`, `out`, `work` and `seconds`.
    """

    name: str
    seconds: float
    module: str
    arguments: tuple[str, ...]
    small: tuple[str, ...]


def _table(
    name: str,
    seconds: float,
    scale: str,
    seeds: int,
    processes: int,
    cells: str = "",
    together: bool = False,
) -> Part:
    def arguments(scale: str, seeds: int, processes: int) -> tuple[str, ...]:
        return (
            "run",
            f"lamb/{name}",
            f"--scale={scale}",
            f"--seeds={seeds}",
            *([f"--cells={cells}"] if cells else []),
            "--data={data}",
            "--runs={work}/runs",
            "--records={work}/records",
            f"--carry={{out}}/{name}.json",
            f"--processes={processes}",
            "--time-limit={seconds}s",
            *(["--together"] if together else []),
            *FREE,
        )

    return Part(
        name,
        seconds,
        "lamb_tpu.reproduce",
        arguments(scale, seeds, processes),
        arguments("smoke", 2 if together else 1, 2),
    )


_MEASURED = ("--data={data}", "--out={out}/measurements.jsonl")
PARTS = (
    Part("check", 25, "experiments.accelerator.check", _MEASURED, (*_MEASURED, "--small")),
    Part("bert", 90, "experiments.accelerator.bert", _MEASURED, (*_MEASURED, "--small")),
    # One program trains the five seeds of a cell.
    _table("mnist", 100, "paper", 5, 4, "momentum,adam,adamw,lamb", together=True),
    _table("cifar10_jpeg", 200, "small", 5, 3),
    Part("speed", 112, "experiments.accelerator.speed", _MEASURED, (*_MEASURED, "--small")),
)


def run(folder: pathlib.Path, out: pathlib.Path, seconds: float, small: bool = False) -> None:
    """Runs all parts, then repeats incomplete parts if time is left.

    Args:
      folder: the folder that `prepare` made.
      out: folder of the results.
      seconds: total time.
      small: whether to use small shapes and smoke runs, to test the program on a CPU.

    Raises:
      UserError: the folder is incomplete, or `out` is not writable.
    """
    began = time.monotonic()
    folder, out = folder.absolute(), out.absolute()
    for name in ("wheels", "data", "commit.json"):
        if not (folder / name).exists():
            remedy = "make the folder with: python -m experiments.accelerator prepare"
            raise UserError(folder, problem=f"has no {name}", remedy=remedy)
    try:
        out.mkdir(parents=True, exist_ok=True)
        report = (out / "report.jsonl").open("a")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise UserError(f"--out {out}", problem=problem, remedy="give another folder") from None
    end, grace = began + (1 - _RESERVE) * seconds, _GRACE * seconds
    # The work folder has a fixed name, so that the same command resumes on the same machine.
    work = pathlib.Path(tempfile.gettempdir()) / f"lamb_tpu_accelerator_{os.getuid()}"
    with report:

        def write_line(**values: object) -> None:
            line = json.dumps({"at": round(time.monotonic() - began, 1), **values})
            print(line, file=report, flush=True)
            print(line, flush=True)

        environment = _environment(folder, work)
        write_line(part="install", ended=_install(folder, work, out, end, grace))
        left, planned = list(PARTS), time.monotonic()
        for is_first in (True, False):
            unfinished = []
            for part in left:
                planned += part.seconds * seconds / (60 * MINUTES)
                # In the second round each part may take all remaining time.
                until = min(end, planned) if is_first else end
                start, ended = time.monotonic(), "time limit"
                if until - start > 2 * grace:
                    ended = _run_part(part, folder, out, work, environment, until, grace, small)
                    write_line(
                        part=part.name, ended=ended, seconds=round(time.monotonic() - start, 1)
                    )
                if ended == "time limit":
                    unfinished.append(part)
            left = unfinished
        names = ", ".join(part.name for part in left)
        write_line(part="all", ended=f"not complete: {names}" if left else "complete")


def _environment(folder: pathlib.Path, work: pathlib.Path) -> dict[str, str]:
    paths = [str(work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LAMB_TPU_COMMIT_FILE": str(folder / "commit.json"),
        # Cache compiled programs for a part that runs again.
        "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _install(
    folder: pathlib.Path, work: pathlib.Path, out: pathlib.Path, end: float, grace: float
) -> str:
    """Installs the wheels of missing packages; returns how the installation ended."""
    site = work / "site"
    if site.exists():
        return "complete"
    missing = []
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        package = wheel.name.partition("-")[0]
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(str(wheel))
    work.mkdir(parents=True, exist_ok=True)
    if not missing:
        site.mkdir()
        return "complete"
    part = work / "site.part"
    shutil.rmtree(part, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--disable-pip-version-check",
        "--target",
        str(part),
        *missing,
    ]
    with _log(out, "install") as log:
        ended = _wait(command, os.environ.copy(), log, end, grace)
    if ended == "complete":
        part.rename(site)
    return ended


def _run_part(
    part: Part,
    folder: pathlib.Path,
    out: pathlib.Path,
    work: pathlib.Path,
    environment: dict[str, str],
    until: float,
    grace: float,
    small: bool,
) -> str:
    """Runs a part with a time limit; returns how the part ended."""
    limit = max(1.0, until - time.monotonic() - 2 * grace)
    command = [
        sys.executable,
        "-m",
        part.module,
        *(
            argument.format(data=folder / "data", out=out, work=work, seconds=f"{limit:.0f}")
            for argument in (part.small if small else part.arguments)
        ),
    ]
    with _log(out, part.name) as log:
        ended = _wait(command, environment, log, until, grace)
    # At its own time limit, `reproduce run` saves and ends with status 0.
    is_late = ended == "complete" and time.monotonic() > until - 2 * grace
    return "time limit" if is_late else ended


def _wait(
    command: list[str], environment: dict[str, str], log: IO[bytes], until: float, grace: float
) -> str:
    """Runs a command with a time limit; returns how the command ended.

    The command runs in a new process group, which is killed when the command ends. `grace` seconds before
    the limit, the group gets SIGTERM; on this signal, training runs save.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=children.following(),
    )
    for wait, number in (
        (until - grace - time.monotonic(), signal.SIGTERM),
        (grace, signal.SIGKILL),
    ):
        try:
            status = process.wait(max(0.1, wait))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            continue
        return _ended(status, number == signal.SIGKILL, process.pid)
    process.wait()
    return _ended(-signal.SIGKILL, True, process.pid)


def _ended(status: int, stopped: bool, group: int) -> str:
    # A worker that outlives its parent would use the device while the next part measures.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    if stopped:
        return "time limit"
    return "complete" if status == 0 else f"failed with exit status {status}; see log.txt"


@contextlib.contextmanager
def _log(out: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    """A file for a part's output; the output's beginning and end are appended to log.txt."""
    with tempfile.TemporaryFile() as file:
        try:
            yield file
        finally:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            text = file.read(_LOG_BYTES // 2)
            if size > _LOG_BYTES // 2:
                file.seek(max(len(text), size - _LOG_BYTES // 2))
                text += b"\n...\n" * (size > _LOG_BYTES) + file.read()
            with (out / "log.txt").open("ab") as log:
                log.write(f"== {name}\n".encode() + text + b"\n")
