"""The points of a search: a grid, or quasi-random points that cover the ranges evenly."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy.stats import qmc

from lamb_tpu.errors import UserError, listed

_RANGE = re.compile(r"(\w+)\((.*)\)")
_FORMS = "log(LOW,HIGH), linear(LOW,HIGH) or values separated by commas"
# Commas within brackets belong to one value, such as a tuple.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
# Maximum number of draws until enough points differ; then the space counts as exhausted.
_DRAWS = 100


class Range(NamedTuple):
    """The range of numbers from `low` to `high`, both included.

    Attributes:
      key: the config key, such as 'optimizer.learning_rate'.
      log: whether points are spaced by equal ratios instead of equal differences.
      integers: whether to round to integers.
    """

    key: str
    low: float
    high: float
    log: bool = False
    integers: bool = False

    def at(self, fraction: float) -> float | int:
        """Returns the number at a fraction, 0 to 1, of the way from `low` to `high`."""
        if self.log:
            value = self.low * (self.high / self.low) ** fraction
        else:
            value = self.low + (self.high - self.low) * fraction
        if self.integers:
            return round(value)
        # Round, so that numbers are short enough to copy, and do not depend on the machine's logarithm.
        return min(max(float(f"{value:.6g}"), self.low), self.high)


class Choice(NamedTuple):
    """A list of values for a config key."""

    key: str
    values: tuple[Any, ...]

    def at(self, fraction: float) -> Any:
        """Returns the value at a fraction, in [0, 1), of the way along the values."""
        return self.values[int(fraction * len(self.values))]


Dimension = Range | Choice


def parse(text: str) -> Dimension:
    """Parses a dimension of a search; the values of a `Choice` are texts.

    >>> parse("optimizer.learning_rate=log(1e-4,1e-1)")
    Range(key='optimizer.learning_rate', low=0.0001, high=0.1, log=True, integers=False)
    >>> parse("optimizer.name=lamb, adamw")
    Choice(key='optimizer.name', values=('lamb', 'adamw'))
    """
    key, _, form = (part.strip() for part in text.partition("="))
    key = key.removeprefix("--").removeprefix("config.")
    if not key or not form:
        raise UserError("--search", text, "is not KEY=FORM", f"use KEY={_FORMS}")
    match = _RANGE.fullmatch(form)
    if match is None:
        values = tuple(value.strip() for value in _COMMA.split(form))
        if "" in values or len(set(values)) < len(values):
            raise UserError("--search", text, "has empty or repeated values", "use distinct values")
        return Choice(key, values)
    if match[1] not in ("log", "linear"):
        raise UserError("--search", text, f"has the unknown form {match[1]!r}", f"use KEY={_FORMS}")
    try:
        low, high = map(float, match[2].split(","))
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(
            "--search", text, "does not have two finite bounds", f"use {match[1]}(LOW,HIGH)"
        )
    if low >= high:
        raise UserError("--search", text, "has an empty range", "use a LOW below HIGH")
    if match[1] == "log" and low <= 0:
        raise UserError(
            "--search",
            text,
            "has a logarithmic range with a bound that is not above 0",
            "use bounds above 0, or linear",
        )
    return Range(key, low, high, match[1] == "log")


def grid(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Returns every combination of values, each as a dictionary by key; the last key changes fastest."""
    keys = [choice.key for choice in choices]
    return [dict(zip(keys, values)) for values in itertools.product(*(c.values for c in choices))]


def halton_points(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """Returns distinct quasi-random points of a search, each as a dictionary from key to value.

    The points come from a scrambled Halton sequence, which covers all dimensions evenly for any
    number of points. The points of a smaller `count` are the first points of a larger `count`.

    References:
      Halton (1960), Numerische Mathematik 2. Owen (2017), arXiv:1706.02808.
    """
    keys = [dimension.key for dimension in dimensions]
    points: dict[tuple[Any, ...], None] = {}
    sampler = qmc.Halton(len(dimensions), rng=seed)
    for _ in range(_DRAWS):
        for fractions in sampler.random(count):
            points.setdefault(tuple(d.at(float(f)) for d, f in zip(dimensions, fractions)))
        if len(points) >= count:
            return [dict(zip(keys, point)) for point in list(points)[:count]]
    raise UserError(
        "--trials",
        count,
        f"is more than the {len(points)} different points of {listed(keys, 'and')}",
        "use fewer trials, or widen the search",
    )
