"""Lengths of time in a config: one string such as '30 epochs', counted in updates when it is used.

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
# No more digits than there are in any length: 10 to the power of a billion takes minutes to write.
_FORMAT = re.compile(
    r"\s*([0-9][0-9_]{0,99}(?:\.[0-9]{1,99})?(?:[eE][+-]?[0-9]{1,3})?)\s+([a-z]+)\s*"
)
_LONGEST = 10**18  # of any unit; a float holds what becomes of it in another one
_EXPECTED = f"one number and one of {', '.join(UNITS)}, as in '30 epochs' or '1_000 steps'"


@dataclasses.dataclass(frozen=True)
class Duration:
    """A number of steps (optimizer updates), epochs, examples, or percent of the whole run.

    The value is kept as the exact fraction that the decimal digits say, so that no rounding error
    adds an update to a run.
    """

    value: Fraction
    unit: str

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or self.unit not in UNITS:
            raise ValueError(f"the unit {self.unit!r} is unknown; known: {', '.join(UNITS)}")
        if not is_number(self.value) or not 0 <= self.value < math.inf:
            raise ValueError(
                f"the value of a duration must be a number of at least 0, not {self.value!r} "
                f"{self.unit}"
            )
        if self.value > _LONGEST:
            raise ValueError(f"a duration must be at most {float(_LONGEST):g} {self.unit}")
        # By way of its digits: Fraction(0.1) would be the binary number next to a tenth, which can
        # add an update to a run.
        exact = isinstance(self.value, (int, Fraction))
        value = Fraction(self.value if exact else str(float(self.value)))
        if self.unit == "percent" and value > 100:
            raise ValueError(f"{self.value} percent is more than the whole run; at most 100")
        object.__setattr__(self, "value", value)

    def __str__(self) -> str:
        value = self.value.numerator if self.value.denominator == 1 else float(self.value)
        return f"{value} {self.unit}"

    def steps(
        self, batch_size: int, num_examples: int | None = None, total_steps: float | None = None
    ) -> float:
        """The duration in updates, which need not be a whole number.

        >>> parse('0.3125 epochs').steps(batch_size=512, num_examples=1_281_167)
        781.9622802734375
        >>> parse('5 percent').steps(batch_size=512, total_steps=1758)
        87.9

        Args:
          batch_size: examples in an update, over all devices.
          num_examples: examples in an epoch, the true number; needed by epochs.
          total_steps: updates in the whole run; needed by percent.

        Raises:
          ValueError: a number that the unit needs is missing, or is not positive.
        """
        return float(self._steps(batch_size, num_examples, total_steps))

    def whole_steps(
        self, batch_size: int, num_examples: int | None = None, total_steps: float | None = None
    ) -> int:
        """The duration in updates, rounded up: a run of 30 epochs sees 30 epochs, or a bit more.

        For lengths that must be whole, as a run's; a warm-up may keep its fraction.
        """
        return math.ceil(self._steps(batch_size, num_examples, total_steps))

    def _steps(
        self, batch_size: int, num_examples: int | None, total_steps: float | None
    ) -> Fraction:
        # The units differ in what they need: steps nothing, percent the length of the run, examples
        # the batch size, and epochs the size of the data too.
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
            raise ValueError(f"'{self}' needs {name}, a number above 0, not {value!r}")
        return Fraction(value) if isinstance(value, (int, Fraction)) else Fraction(float(value))


def parse(text: Any) -> Duration:
    """Reads a duration.

    >>> print(parse('50_000 examples'), '|', parse('1 epoch'))
    50000 examples | 1 epochs

    Raises:
      ValueError: anything but one number that is not negative and one known unit.
    """
    if isinstance(text, Duration):
        return text
    match = _FORMAT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write {_EXPECTED}")
    unit = match[2]
    # '1 epoch' is as good as '1 epochs'.
    for known in UNITS:
        if unit == known.removesuffix("s"):
            unit = known
    if unit not in UNITS:
        raise ValueError(f"{text!r} has the unknown unit {match[2]!r}; write {_EXPECTED}")
    return Duration(Fraction(match[1].replace("_", "")), unit)
