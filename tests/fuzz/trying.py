"""Tries one case: its rejection, or both legs against the oracle."""

import dataclasses
import pathlib
import tempfile
import traceback

import numpy as np

from tests import tiny
from tests.fuzz import checking, comparing, families, oracle, parts, promises, reference, running
from tests.fuzz.case import PROCESSES, Case, num_devices
from tests.fuzz.comparing import LIMIT, Difference


@dataclasses.dataclass
class Outcome:
    """The result of a case.

    Attributes:
      rejected: the sentence that rejected the case; '' if it ran.
      problems: what is wrong; empty for a case that passes.
      differences: all comparisons with the oracle.
    """

    rejected: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    differences: list[Difference] = dataclasses.field(default_factory=list)


def attempt(case: Case, compiles: checking.Compiles) -> Outcome:
    """Tries a case; an exception other than a rejection is a problem of the case."""
    try:
        rejected = checking.rejection(case, compiles)
        if rejected is not None:
            return Outcome(str(rejected.error), checking.problems(case, rejected))
        differences = _differences(case)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{pathlib.Path(last.filename).name}:{last.lineno}"
        return Outcome(problems=[f"{type(error).__name__} at {place}: {_line(error)}"])
    wrong = [each for each in differences if not each.ratio <= LIMIT]
    wrong.sort(key=lambda each: (np.isfinite(each.ratio), -each.ratio))
    return Outcome("", [str(each) for each in wrong], differences)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _differences(case: Case) -> list[Difference]:
    with tempfile.TemporaryDirectory(prefix="lamb_tpu_fuzz_") as name:
        folder = pathlib.Path(name)
        first = running.run_leg(case.made(case.first), num_devices(case.first), folder / "first")
        tiny.cut(folder / "first", folder / "second", families.SAVED)
        if PROCESSES in case.second:
            second = running.run_processes(case, folder / "second")
        else:
            config = case.made(case.second)
            second = running.run_leg(config, num_devices(case.second), folder / "second")
    legs = {"first": first, "second": second}
    made = oracle.Oracle(case)
    found = reference.rates(made, legs) + reference.dtypes(case, made)
    if promises.is_lossy(case):
        return found + promises.compare(made, legs)
    exact_ones = made.trajectories()
    found += reference.trajectory(case, made, exact_ones) + parts.compare(case, made, legs)
    for leg, results in legs.items():
        found += comparing.compare(leg, results, exact_ones)
    return found
