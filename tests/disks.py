"""Small disks that can be filled or made read-only, and runs as their user starts them."""

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
# 4.6 MiB a checkpoint, of which a disk of 20 MiB takes four.
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
    """The end of a command.

    Attributes:
      status: its exit status.
      out: what it printed.
      err: what it printed as errors.
      seconds: how long it took.
    """

    status: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The sentences of its end."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    def check(self, status: int) -> "End":
        """Asserts how it ended, and that it took no more than a few lines to say so."""
        assert self.status == status, (self.status, self.out, self.err)
        assert "Traceback" not in self.out + self.err, self.err
        assert len(self.err.splitlines()) <= 4, self.err
        if status == 2:
            assert len(self.errors) == 1, self.err
        return self


class Run:
    """A run of ARGUMENTS that is under way, of one process or of two.

    Args:
      workdir: of the run.
      more: further arguments.
      processes: how many.
      limits: names of the module resource and their values.
      module: the command.
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
        """Waits for something to be so, while the run is under way."""
        deadline = time.monotonic() + 120
        while not is_so():
            assert self.popen.poll() is None, self.popen.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def end(self) -> End:
        """Waits for the end."""
        try:
            out, err = self.popen.communicate(timeout=150)
        finally:
            self.popen.kill()
        return End(self.popen.returncode, out, err, time.monotonic() - self._began)


def run(workdir: pathlib.Path, *more: str, **options: object) -> End:
    """A `Run` to its end."""
    return Run(workdir, *more, **options).end()


def checkpoints(workdir: pathlib.Path) -> set[int]:
    """Updates of the checkpoints that are finished; each must be whole."""
    found = {path for path in workdir.glob("checkpoints/*") if path.name.isdecimal()}
    for path in found:
        assert checksums.find_damage(path) is None, path
    return {int(path.name) for path in found}


def told_as_safe(end: End) -> int:
    """The update that the sentence calls safe."""
    return int(re.search(r"that of update (\d+) is safe", end.errors[0])[1])


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")


@dataclasses.dataclass(frozen=True)
class Disk:
    """A file system in memory, of its own."""

    path: pathlib.Path

    def remount(self, options: str) -> None:
        """Changes it, for example to 'size=100m' or 'ro'; processes have files open there."""
        subprocess.run(
            ["mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True
        )

    def fill(self, leaving: int = 0) -> pathlib.Path:
        """A file that takes what is free but for some bytes."""
        path = self.path / "filling"
        free = os.statvfs(self.path)
        with path.open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(free.f_bavail * free.f_bsize - leaving))
        return path


@contextlib.contextmanager
def disk(path: pathlib.Path, options: str = "size=20m") -> Iterator[Disk]:
    """Mounts a file system at `path`, which is made; skips the test where one may not."""
    if sys.platform != "linux" or os.getuid():
        pytest.skip("only root may mount file systems, on Linux")
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)
