"""Common parts of the rules: whole quanta, the interval, bounds, and reading of statistics."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from lamb_tpu.optim.checks import check_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for the next batch size.

    Everything is Python numbers on the host, so that all processes decide alike.

    Attributes:
      quantum: a batch is a whole number of so many examples: devices times the microbatch of one.
      interval: updates from one decision to the next.
      needs: names of the statistics that `next_batch` reads; none: the batch is a function of the
        examples seen.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    quantum: int
    interval: int = 1

    def __post_init__(self) -> None:
        for name in ("quantum", "interval"):
            check_whole(name, getattr(self, name), lowest=1)

    def due(self, updates: int) -> bool:
        """Returns True where, after so many completed updates, the next batch is to be decided."""
        return updates % self.interval == 0

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the next batch size in examples, a whole number of quanta.

        Args:
          batch: the present batch size, in examples.
          statistics: numbers by name, of the present update.
          examples: seen so far.

        Raises:
          ValueError: a statistic that is missing.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(Rule):
    """A rule whose batch stays within bounds; a subclass says which batch it wants.

    Attributes:
      upper: the largest batch size, a whole number of quanta.
      lower: the smallest, a whole number of quanta; None for one quantum.
    """

    upper: int
    lower: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lower", "upper"):
            if getattr(self, name) is not None:
                check_quanta(name, getattr(self, name), self.quantum)
        if self.smallest > self.upper:
            raise ValueError(f"lower must be at most upper, {self.upper}, not {self.smallest}")

    @property
    def smallest(self) -> int:
        """The smallest batch size, in examples."""
        return self.quantum if self.lower is None else self.lower

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the batch size that the statistics call for, before bounds and rounding."""
        raise NotImplementedError

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns what is wanted within the bounds, rounded up to whole quanta."""
        wanted = self.wanted(batch, statistics)
        if math.isnan(wanted):
            return batch  # gradients that are not finite say nothing of the batch
        wanted = min(max(wanted, self.smallest), self.upper)
        return math.ceil(wanted / self.quantum) * self.quantum


def check_quanta(name: str, batch: int, quantum: int) -> None:
    """Raises ValueError unless the batch size is a whole number of quanta, at least one."""
    check_whole(name, batch, lowest=1)
    if batch % quantum:
        below = batch // quantum * quantum
        near = f"{below} or {below + quantum}" if below else f"{quantum}"
        raise ValueError(
            f"{name} must be a whole number of quanta of {quantum} examples, as {near}, not {batch}"
        )


def read(statistics: Mapping[str, float], name: str) -> float:
    """Returns the statistic of that name as a Python number.

    Raises ValueError where there is none.
    """
    if name not in statistics:
        raise ValueError(
            f"the rule needs the statistic {name!r}; measured: {', '.join(statistics) or 'none'}"
        )
    return float(statistics[name])


def required(variance: float, square: float) -> float:
    """Returns variance / square, the batch size that a test asks for.

    Infinite where only the square is 0, so that the largest batch is taken; 0, which asks for
    nothing, where both are, and where one of them is NaN.
    """
    if square == 0:
        return math.inf if variance > 0 else 0.0
    value = variance / square
    return 0.0 if math.isnan(value) else value
