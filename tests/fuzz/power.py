"""Measures how fast the fuzzer finds planted faults: `python -m tests.fuzz.power --minutes=20`.

Each patch in `faults` is applied to a temporary copy of the tree, in which the fuzzer runs until it
finds a failure. The first line of a patch says what is wrong.
"""

import argparse
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "fuzz" / "faults"
# What a run needs; the tests need only `tests` without its large folders.
COPIED = ("lamb_tpu", "tests/__init__.py", "tests/tiny.py", "tests/commands.py", "tests/fuzz")
COPIED += ("tests/compiling.py", "configs", "pyproject.toml")


class Found(NamedTuple):
    """The result of a fault.

    Attributes:
      seconds: time until the fuzzer printed a failure, with its start; None if it found none.
      problem: the first problem of the failing case.
      case: the command of the failing case, shrunk if there was time.
      is_false: whether the case fails without the fault too.
    """

    fault: str
    seconds: float | None
    problem: str
    case: str
    is_false: bool = False


def copy_of_tree(folder: pathlib.Path, patch: pathlib.Path) -> None:
    """Copies the package and the fuzzer into a folder, and applies a patch there."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)


def find(patch: pathlib.Path, minutes: float, seed: int, shrink: float) -> Found:
    """Runs the fuzzer on a fault until it fails or the time is over."""
    with tempfile.TemporaryDirectory(prefix="lamb_tpu_power_") as name:
        copy_of_tree(pathlib.Path(name), patch)
        command = [sys.executable, "-m", "tests.fuzz", "--stop", f"--minutes={minutes}"]
        command += [f"--seed={seed}", f"--shrink={shrink}"]
        began, lines, seconds = time.monotonic(), [], None
        process = subprocess.Popen(
            command, cwd=name, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if " FAILED, " in line and seconds is None:
                seconds = time.monotonic() - began
        process.wait()
    if seconds is None and not any("| cases |" in line for line in lines):
        raise RuntimeError(f"{patch.stem}: " + "\n".join(lines[-5:]))
    failure = next((i for i, line in enumerate(lines) if " FAILED, " in line), None)
    problem = "" if failure is None else lines[failure + 1].strip()
    commands = [line.strip() for line in lines if line.strip().startswith(("smallest:", "failed:"))]
    case = re.sub(r"^(smallest|failed): ", "", commands[-1]) if commands else ""
    return Found(patch.stem, seconds, problem, case, bool(case) and fails_here(case))


def fails_here(case: str) -> bool:
    """Returns whether a case fails in the tree without faults."""
    command = [sys.executable, *shlex.split(case)[1:]]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode != 0


def main(arguments: list[str]) -> int:
    """Prints a table of all faults; returns the number of faults that were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.power", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="longest time for each fault")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to shrink a failure")
    parser.add_argument("faults", nargs="*", help="names of faults; by default all")
    flags = parser.parse_args(arguments)
    patches = sorted(FAULTS.glob("*.patch"))
    chosen = [each for each in patches if not flags.faults or each.stem in flags.faults]
    results = []
    for number, patch in enumerate(chosen, start=1):
        results.append(find(patch, flags.minutes, flags.seed, flags.shrink))
        print(f"{number} of {len(chosen)}: {row(results[-1])}", flush=True)
    missed = sum(each.seconds is None or each.is_false for each in results)
    print("\n| fault | seconds | problem | case |\n|---|---|---|---|")
    for result in results:
        print(row(result))
    print(f"\n{len(results) - missed} of {len(results)} faults were found")
    return missed


def row(found: Found) -> str:
    """Returns the row of a fault in the table."""
    seconds = "not found" if found.seconds is None else f"{found.seconds:.0f}"
    if found.is_false:
        seconds = "false alarm"
    return f"| {found.fault} | {seconds} | {found.problem} | {found.case} |"


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
