"""The points of a search: a grid, or quasi-random ones that cover ranges evenly."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy.stats import qmc

from lamb_tpu.errors import UserError

_RANGE = re.compile(r"(\w+)\((.*)\)")
_FORMS = "log(LOW,HIGH), linear(LOW,HIGH) or values separated by commas"
# Commas within brackets belong to one value, such as a tuple.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
# Draws for each point that is wanted; where these repeat each other, there are no more points.
_DRAWS = 100


class Range(NamedTuple):
    """Numbers between two bounds.

    Attributes:
      key: the key of the config, such as 'optimizer.learning_rate'.
      low, high: the bounds.
      log: whether equal ratios are equally far apart, instead of equal differences.
      whole: whether only whole numbers are taken.
    """

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, fraction: float) -> float | int:
        """Returns the number at a fraction, 0 to 1, of the way from `low` to `high`."""
        if self.log:
            value = self.low * (self.high / self.low) ** fraction
        else:
            value = self.low + (self.high - self.low) * fraction
        if self.whole:
            return round(value)
        # A number that can be read and copied, and the same one whatever the machine's logarithm.
        return min(max(float(f"{value:.6g}"), self.low), self.high)


class Choice(NamedTuple):
    """Some values of a key of the config."""

    key: str
    values: tuple[Any, ...]

    def at(self, fraction: float) -> Any:
        """Returns the value at a fraction, 0 to 1 and less than 1, of the way along the values."""
        return self.values[int(fraction * len(self.values))]


Dimension = Range | Choice


def parse(text: str) -> Dimension:
    """Parses a dimension of a search; the values of a `Choice` are texts.

    >>> parse("optimizer.learning_rate=log(1e-4,1e-1)")
    Range(key='optimizer.learning_rate', low=0.0001, high=0.1, log=True, whole=False)
    >>> parse("optimizer.name=lamb, adamw")
    Choice(key='optimizer.name', values=('lamb', 'adamw'))

    Raises:
      UserError: it has another form, or its bounds contain nothing.
    """
    key, _, form = (part.strip() for part in text.partition("="))
    key = key.removeprefix("--").removeprefix("config.")
    if not key or not form:
        raise UserError(f"--search is {text!r}; give KEY=FORM with {_FORMS}")
    match = _RANGE.fullmatch(form)
    if match is None:
        values = tuple(value.strip() for value in _COMMA.split(form))
        if "" in values or len(set(values)) < len(values):
            raise UserError(f"--search={key} is {form!r}; give different values, none empty")
        return Choice(key, values)
    if match[1] not in ("log", "linear"):
        raise UserError(f"--search={key} has the unknown form {match[1]!r}; give {_FORMS}")
    try:
        low, high = map(float, match[2].split(","))
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"--search={key} is {form!r}; {match[1]}(LOW,HIGH) takes two numbers")
    if low >= high:
        raise UserError(f"--search={key} is {form!r}, which is empty; the first must be less")
    if match[1] == "log" and low <= 0:
        raise UserError(
            f"--search={key} is {form!r}; the bounds of log must be above 0, those of linear need "
            "not be"
        )
    return Range(key, low, high, match[1] == "log")


def grid(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Returns every combination of the values, as values by key; the last key changes fastest."""
    keys = [choice.key for choice in choices]
    return [dict(zip(keys, values)) for values in itertools.product(*(c.values for c in choices))]


def halton_points(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """Returns quasi-random points of a search, as values by key, no two of them equal.

    They are of a scrambled Halton sequence, which covers all dimensions evenly however many points
    are taken. The points of a smaller `count` are the first ones of a larger.

    Args:
      dimensions: the ranges and choices.
      count: number of points.
      seed: of the scrambling.

    Raises:
      UserError: there are not so many different points.

    References:
      Halton (1960), Numerische Mathematik 2. Owen (2017), arXiv:1706.02808.
    """
    keys = [dimension.key for dimension in dimensions]
    found: dict[tuple[Any, ...], None] = {}
    sampler = qmc.Halton(len(dimensions), rng=seed)
    for _ in range(_DRAWS):
        for fractions in sampler.random(count):
            found.setdefault(tuple(d.at(float(f)) for d, f in zip(dimensions, fractions)))
        if len(found) >= count:
            return [dict(zip(keys, point)) for point in list(found)[:count]]
    raise UserError(
        f"the search of {', '.join(keys)} has {len(found)} different points and not {count}; ask "
        "for fewer, or search wider"
    )
