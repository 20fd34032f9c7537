"""Durations in a config, such as '30 epochs', and their conversion to updates.

>>> parse('30 epochs').steps(batch_size=1024, num_examples=60_000)
1757.8125
>>> parse('30 epochs').whole_steps(batch_size=1024, num_examples=60_000)
1758
"""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

from lamb_tpu.optim.checks import is_number

UNITS = ("steps", "epochs", "examples", "percent")
# The limits on the number of digits exclude numbers such as 1e1000000000, which take minutes to
# parse.
_FORMAT = re.compile(
    r"\s*([0-9][0-9_]{0,99}(?:\.[0-9]{1,99})?(?:[eE][+-]?[0-9]{1,3})?)\s+([a-z]+)\s*"
)
_LONGEST = 10**18  # in any unit; after a conversion to another unit it still fits into a float
_EXPECTED = f"one number and one unit ({', '.join(UNITS)}), as in '30 epochs' or '1_000 steps'"


@dataclasses.dataclass(frozen=True)
class Duration:
    """A number of steps (optimizer updates), epochs, examples, or percent of the full run.

    The value is stored as an exact fraction, so that no rounding error adds an update to a run.
    """

    value: Fraction
    unit: str

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or self.unit not in UNITS:
            raise ValueError(f"unit={self.unit!r} is unknown; use one of {', '.join(UNITS)}")
        if not is_number(self.value) or not 0 <= self.value < math.inf:
            raise ValueError(f"value={self.value!r} {self.unit} must be a number of at least 0")
        if self.value > _LONGEST:
            raise ValueError(f"a duration must be at most {float(_LONGEST):g} {self.unit}")
        # Convert a float by its digits: Fraction(0.1) is not exactly a tenth, and the error could
        # add an update to a run.
        exact = isinstance(self.value, (int, Fraction))
        value = Fraction(self.value if exact else str(float(self.value)))
        if self.unit == "percent" and value > 100:
            raise ValueError(f"{self.value} percent exceeds the full run; use at most 100 percent")
        object.__setattr__(self, "value", value)

    def __str__(self) -> str:
        value = self.value.numerator if self.value.denominator == 1 else float(self.value)
        return f"{value} {self.unit}"

    def steps(
        self, batch_size: int, num_examples: int | None = None, total_steps: float | None = None
    ) -> float:
        """Converts the duration to a number of updates, which need not be whole.

        >>> parse('0.3125 epochs').steps(batch_size=512, num_examples=1_281_167)
        781.9622802734375
        >>> parse('5 percent').steps(batch_size=512, total_steps=1758)
        87.9

        Args:
          batch_size: examples per update, over all devices.
          num_examples: the exact number of examples per epoch; required for epochs.
          total_steps: updates in the full run; required for percent.

        Raises:
          ValueError: an argument that the unit requires is missing or not positive.
        """
        return float(self._steps(batch_size, num_examples, total_steps))

    def whole_steps(
        self, batch_size: int, num_examples: int | None = None, total_steps: float | None = None
    ) -> int:
        """Converts the duration to updates and rounds up; `steps` describes the arguments.

        Use this for the length of a run, which must be whole. The length of a warm-up may be a
        fraction.
        """
        return math.ceil(self._steps(batch_size, num_examples, total_steps))

    def _steps(
        self, batch_size: int, num_examples: int | None, total_steps: float | None
    ) -> Fraction:
        if self.unit == "steps":
            return self.value
        if self.unit == "percent":
            return self.value * self._need("total_steps", total_steps) / 100
        examples = self.value
        if self.unit == "epochs":
            examples *= self._need("num_examples", num_examples)
        return examples / self._need("batch_size", batch_size)

    def _need(self, name: str, value: float | None) -> Fraction:
        if value is None or not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"'{self}' needs a finite number above 0 for {name}, not {value!r}")
        return Fraction(value) if isinstance(value, (int, Fraction)) else Fraction(float(value))


def parse(text: Any) -> Duration:
    """Parses a duration: one number and one unit.

    >>> print(parse('50_000 examples'), '|', parse('1 epoch'))
    50000 examples | 1 epochs

    Raises:
      ValueError: `text` is not one number of at least 0 with one known unit.
    """
    if isinstance(text, Duration):
        return text
    match = _FORMAT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write {_EXPECTED}")
    # Accept a unit without its final s, as in '1 epoch'.
    unit = next((unit for unit in UNITS if match[2] in (unit, unit.removesuffix("s"))), None)
    if unit is None:
        raise ValueError(f"{text!r} has the unknown unit {match[2]!r}; write {_EXPECTED}")
    return Duration(Fraction(match[1].replace("_", "")), unit)
