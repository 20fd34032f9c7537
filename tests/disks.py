"""Small disks that can be filled or made read-only, and runs that are started from the command line."""

import contextlib
import dataclasses
import os
import pathlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from lamb_tpu.store import checksums
from tests import tiny

STEPS = 60
# A checkpoint takes 4.6 MiB, so a disk of 20 MiB holds four checkpoints.
ARGUMENTS = [
    "--config=configs/digits.py:optimizer=lamb,batch=32",
    "--config.model.hidden_sizes=(600,600)",
    f"--config.duration={STEPS} steps",
    "--config.checkpoint.every=5 steps",
    "--config.checkpoint.keep=20",
    "--config.eval.every=20 steps",
    "--config.log.every=5 steps",
    "--config.log.tensorboard=false",
]


@dataclasses.dataclass(frozen=True)
class End:
    """The outcome of a command.

    Attributes:
      status: exit status.
      out: standard output.
      err: standard error.
      seconds: duration.
    """

    status: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    def check(self, status: int) -> "End":
        """Asserts the exit status, and that stderr has no traceback and only a few lines."""
        assert self.status == status, (self.status, self.out, self.err)
        assert "Traceback" not in self.out + self.err, self.err
        assert len(self.err.splitlines()) <= 4, self.err
        if status == 2:
            assert len(self.errors) == 1, self.err
        return self


class Run:
    """A run of ARGUMENTS in progress, with one or two processes.

    Args:
      workdir: workdir of the run.
      more: further arguments.
      processes: number of processes.
      limits: pairs of a limit, such as `resource.RLIMIT_NOFILE`, and its value.
      module: module of the command.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *more: str,
        processes: int = 1,
        limits: Sequence[tuple[int, int]] = (),
        module: str = "lamb_tpu.train",
    ) -> None:
        arguments = [*(ARGUMENTS if module == "lamb_tpu.train" else []), f"--workdir={workdir}"]
        if processes > 1:
            arguments = ["local", f"--processes={processes}", "--", *arguments]
            module = "lamb_tpu.launch"
        self.workdir = workdir
        self._began = time.monotonic()
        self.popen = tiny.start(module, *arguments, *more)
        for name, value in limits:
            resource.prlimit(self.popen.pid, name, (value, value))

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not is_so():
            assert self.popen.poll() is None, self.popen.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def end(self) -> End:
        try:
            out, err = self.popen.communicate(timeout=150)
        finally:
            self.popen.kill()
        return End(self.popen.returncode, out, err, time.monotonic() - self._began)


def run(workdir: pathlib.Path, *more: str, **options: object) -> End:
    return Run(workdir, *more, **options).end()


def checkpoints(workdir: pathlib.Path) -> set[int]:
    """Returns the update numbers of the finished checkpoints; asserts that no checkpoint is damaged."""
    actual = {path for path in workdir.glob("checkpoints/*") if path.name.isdecimal()}
    for path in actual:
        assert checksums.find_damage(path) is None, path
    return {int(path.name) for path in actual}


def reported_safe(end: End) -> int:
    """Returns the update of the checkpoint that the error message calls safe."""
    return int(re.search(r"checkpoint of update (\d+) is safe", end.errors[0])[1])


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")


@dataclasses.dataclass(frozen=True)
class Disk:
    path: pathlib.Path

    def remount(self, options: str) -> None:
        """Changes the mount options, for example to 'size=100m' or 'ro'; works while files are open."""
        subprocess.run(
            ["mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True
        )

    def fill(self, leaving: int = 0) -> pathlib.Path:
        """Fills the disk with a file, except for `leaving` bytes."""
        path = self.path / "filling"
        free = os.statvfs(self.path)
        with path.open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(free.f_bavail * free.f_bsize - leaving))
        return path


@contextlib.contextmanager
def disk(path: pathlib.Path, options: str = "size=20m") -> Iterator[Disk]:
    """Mounts a small file system at `path`, a new folder; skips the test if mounting is not allowed."""
    if sys.platform != "linux" or os.getuid():
        pytest.skip("only root may mount file systems, on Linux")
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)
