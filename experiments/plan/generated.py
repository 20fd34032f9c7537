"""Generates the module lamb_tpu/cost/calibrated.py."""

import pathlib

from lamb_tpu.cost.network import Bounds, Calibrations, Constants

PATH = pathlib.Path(__file__).parents[2] / "lamb_tpu" / "cost" / "calibrated.py"
_HEAD = '''"""Constants of the network and of the computation that are fitted to measured runs.

`python -m experiments.plan` generates this file. experiments/plan/calibration.md describes the fit,
and compares each run with its plan. Each generation of TPU has three sets of constants, for the
shortest, the expected and the longest time of a program that has no runs in the fit.
"""

from lamb_tpu.cost.network import Bounds, Calibrations, Constants, Validation

CALIBRATED = Calibrations(
    {
'''


def text(calibrations: Calibrations) -> str:
    """Returns the module with these constants, rounded to three significant digits."""
    known = "".join(
        f'        "{version}": {_bounds(each, 8)},\n'
        for version, each in calibrations.known.items()
    )
    validation = calibrations.validation
    generations = ", ".join(
        f'"{version}": {counts}' for version, counts in validation.generations.items()
    )
    return (
        f"{_HEAD}{known}    }},\n"
        f"    {_bounds(calibrations.unseen, 4)},\n"
        f'    "{calibrations.fitted_to}",\n'
        "    Validation(\n"
        f"        {validation.programs}, {{{generations}}},\n"
        f"        {_numbers(validation.new_program)}, {_numbers(validation.known_program)},\n"
        "    ),\n"
        ")\n"
    )


def _bounds(each: Bounds, indent: int) -> str:
    inner = "".join(f"{' ' * (indent + 4)}{_constants(one)},\n" for one in each)
    return f"Bounds(\n{inner}{' ' * indent})"


def _constants(one: Constants) -> str:
    values = (
        one.efficiency,
        one.hop_seconds,
        one.collective_seconds,
        one.datacenter_efficiency,
        one.datacenter_seconds,
        one.compute_factor,
    )
    return f"Constants{_numbers(values)}"


def _numbers(values: tuple[float, ...]) -> str:
    return f"({', '.join(repr(float(f'{value:.3g}')) for value in values)})"
