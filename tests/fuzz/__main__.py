"""Draws and tries cases: `python -m tests.fuzz --minutes=20 --seed=N`, or `--case=JSON` for one."""

import argparse
import gc
import os
import pathlib
import sys
import time

os.environ["NPROC"] = (
    "32"  # see tests/conftest.py: with few threads, simulated devices can deadlock
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

from tests import compiling

os.environ.setdefault("XLA_FLAGS", compiling.flags())

import jax

from tests.fuzz import checking, shrinking, summary, trying
from tests.fuzz.case import Case
from tests.fuzz.drawing import draw

MOST_BYTES = 2.5 * 2**30
SHRINKING_SECONDS = 300.0


def main(arguments: list[str]) -> int:
    """Tries cases for some minutes; returns the number of cases that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to draw new cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--case", help="one case as JSON, as a failure prints it")
    parser.add_argument("--write", action="store_true", help="write failures into tests/fuzz/found")
    parser.add_argument("--stop", action="store_true", help="end at the first failure")
    parser.add_argument("--shrink", type=float, default=SHRINKING_SECONDS, help="seconds")
    flags = parser.parse_args(arguments)
    report = summary.Summary(checking.Compiles())
    if flags.case is not None:
        return int(not _one(report, Case.from_json(flags.case)))
    end, number = time.monotonic() + 60 * flags.minutes, flags.seed
    while time.monotonic() < end:
        case = draw(number)
        if not _one(report, case, number, end):
            smallest = _shrunk(report, case, min(flags.shrink, max(end - time.monotonic(), 60)))
            if flags.write:
                name = f"seed_{number}.json"
                folder = pathlib.Path(__file__).parent / "found"
                folder.mkdir(exist_ok=True)
                (folder / name).write_text(smallest.to_json())
            if flags.stop:
                break
        number += 1
        _forget()
    print(report.table())
    return report.failed


def _one(
    report: "summary.Summary", case: Case, number: int | None = None, end: float = 0.0
) -> bool:
    """Tries a case and reports it; returns whether it passed."""
    began = time.monotonic()
    outcome = trying.attempt(case, report.compiles)
    report.add(case, outcome, time.monotonic() - began)
    left = max(end - time.monotonic(), 0)
    print(report.line(number, case, outcome, left), flush=True)
    for problem in outcome.problems[:5]:
        print(f"    {problem}", flush=True)
    if outcome.problems:
        print(f"    {summary.command(case)}", flush=True)
    return not outcome.problems


def _shrunk(report: "summary.Summary", case: Case, seconds: float) -> Case:
    print(f"shrinking for up to {seconds:.0f} s", flush=True)
    compiles = report.compiles

    def fails(candidate: Case) -> bool:
        # A rejection of the smaller case is no failure.
        outcome = trying.attempt(candidate, compiles)
        return bool(outcome.problems) and not outcome.rejected

    smallest = case if not seconds else shrinking.shrink(case, fails, seconds)
    report.shrunk.append(smallest)
    print(f"  smallest: {summary.command(smallest)}", flush=True)
    return smallest


def _forget() -> None:
    """Drops JAX's compiled programs when the process has become large."""
    memory = pathlib.Path("/proc/self/statm")
    pages = int(memory.read_text().split()[1]) if memory.exists() else 0
    if pages * os.sysconf("SC_PAGE_SIZE") > MOST_BYTES:
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
