"""Reads and checks the arguments after --, which are the arguments of the run."""

import re
from collections.abc import Sequence

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets

TRAIN = "lamb_tpu.train"
# Modules that a cluster runs, each with the option for the folder that outlives the machine.
FOLDERS = {TRAIN: "workdir", "lamb_tpu.reproduce": "records", "lamb_tpu.sweep": "workdir"}


def workdir(arguments: Sequence[str]) -> str | None:
    """Returns the value of --workdir (the last value if the flag is repeated); None if it is missing.

    >>> workdir(["--config=digits", "--workdir", "runs/a"])
    'runs/a'
    """
    return _value(arguments, "workdir")


def _value(arguments: Sequence[str], name: str) -> str | None:
    # Join by NUL, which no argument can contain, so that one pattern matches both --workdir=DIR and
    # --workdir DIR.
    values = re.findall(rf"(?:^|\0)--?{name}[=\0]([^\0]+)", "\0".join(arguments))
    return values[-1] if values else None


def needed_folder(arguments: Sequence[str], module: str = TRAIN) -> str:
    """Returns the folder that outlives the machine: for a training run, the value of --workdir.

    Raises:
      UserError: the option is missing, or its URL is not a folder in a bucket.
    """
    name = FOLDERS[module]
    folder = _value(arguments, name)
    if folder is None:
        raise UserError(
            f"--{name}", problem="is missing in the arguments after --", remedy="see --help"
        )
    if buckets.is_remote(folder):
        buckets.check_folder(folder, f"--{name}")
    return folder


def check_array(arguments: Sequence[str], module: str, array: int | None) -> None:
    """Checks that a module and its arguments can run as `array` jobs, or as one job if `array` is None."""
    if module == TRAIN:
        if array is not None:
            raise UserError(
                "--array",
                array,
                "would train the same run in every job",
                "give --module=lamb_tpu.reproduce or --module=lamb_tpu.sweep, which have many runs",
            )
        return
    if array is None:
        raise UserError(
            "--array",
            problem=f"is missing, and {module} runs as an array of jobs",
            remedy="give the number of jobs, which may be 1",
        )
    if module == "lamb_tpu.reproduce" and list(arguments[:1]) != ["run"]:
        raise UserError(
            "the arguments after --",
            problem="do not begin with run, the command of lamb_tpu.reproduce that trains",
            remedy="put run first",
        )
    if any(re.match(r"--?index(=|$)", argument) for argument in arguments):
        raise UserError("--index", problem="is set by the launcher", remedy="leave it out after --")
