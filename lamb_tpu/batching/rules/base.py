"""Base classes of the rules: granularity, interval, bounds, and access to statistics."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from lamb_tpu.batching import noise_scale
from lamb_tpu.optim.checks import check_whole

NOISE_SCALE = "noise_scale"
DECAY = 0.99  # the decay of moving averages, if a rule has no field `decay`

State = tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for the next batch size.

    `init` and `update` maintain the state of the rule, and `next_batch` decides. All values are
    Python numbers on the host and equal in all processes, so all processes make the same decision.

    Attributes:
      granularity: the number of examples of a microbatch over all devices. Every batch size is a
        multiple of this number.
      interval: the number of updates between decisions.
      needs: the names of the statistics that `next_batch` reads. If there are none, the batch size is
        a function of the number of examples seen.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    granularity: int
    interval: int = 1

    def __post_init__(self) -> None:
        for name in ("granularity", "interval"):
            check_whole(name, getattr(self, name), lowest=1)

    def due(self, updates: int) -> bool:
        """Returns whether the rule decides after this number of completed updates."""
        return updates % self.interval == 0

    def init(self) -> State:
        """Returns the state before the first update: a tuple of numbers, which checkpoints store."""
        return noise_scale.init()

    def update(
        self, state: State, statistics: Mapping[str, float]
    ) -> tuple[State, Mapping[str, float]]:
        """Returns the state after one more update, and the statistics that `next_batch` reads.

        If the rule needs the noise scale, the state has moving averages of the scale's two estimates. A
        statistic that this update did not measure is NaN.
        """
        if not all(name in statistics for name in noise_scale.PAIR):
            return state, statistics
        averages = noise_scale.NoiseScaleState(*state)
        if NOISE_SCALE in self.needs:
            pair = noise_scale.Estimate(*(statistics[name] for name in noise_scale.PAIR))
            averages = noise_scale.update(averages, pair, getattr(self, "decay", DECAY))
        return averages, {**statistics, NOISE_SCALE: float(noise_scale.noise_scale(averages))}

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the next batch size in examples, a multiple of the batch granularity.

        Args:
          batch: the current batch size, in examples.
          statistics: the statistics by name, as `update` returns them.
          examples: the number of examples seen so far.

        Raises:
          ValueError: a statistic that the rule needs is missing.
        """
        raise NotImplementedError

    def decide(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the result of `next_batch`; raises ValueError if it is not a valid batch size."""
        found = self.next_batch(batch, statistics, examples)
        check_granularity("next_batch", found, self.granularity)
        return int(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Rule):
    """A rule that never changes the batch size.

    >>> Constant(granularity=8).next_batch(64, {}, examples=10_000)
    64
    """

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the current batch size."""
        del statistics, examples
        return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(Rule):
    """Base class of rules with bounds on the batch size; subclasses define `wanted`.

    Attributes:
      upper: the largest batch size in examples, a multiple of the batch granularity.
      lower: the smallest batch size in examples, a multiple of the batch granularity; None for the
        granularity itself.
    """

    upper: int
    lower: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lower", "upper"):
            if getattr(self, name) is not None:
                check_granularity(name, getattr(self, name), self.granularity)
        if self.smallest > self.upper:
            raise ValueError(f"lower={self.smallest} must be at most upper={self.upper}")

    @property
    def smallest(self) -> int:
        """The smallest batch size, in examples."""
        return self.granularity if self.lower is None else self.lower

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the batch size that follows from the statistics, before bounds and rounding."""
        raise NotImplementedError

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the wanted batch within the bounds, rounded up to a multiple of the granularity."""
        wanted = self.wanted(batch, statistics)
        if math.isnan(wanted):  # there is no estimate yet, or gradients are not finite
            return batch
        wanted = min(max(wanted, self.smallest), self.upper)
        return math.ceil(wanted / self.granularity) * self.granularity

    def decide(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the result of `next_batch`; raises ValueError if it is not a valid batch size."""
        found = super().decide(batch, statistics, examples)
        if not self.smallest <= found <= self.upper:
            raise ValueError(f"next_batch={found} must be between {self.smallest} and {self.upper}")
        return found


def check_granularity(name: str, batch: int, granularity: int) -> None:
    """Raises ValueError unless the batch size is a positive multiple of the batch granularity."""
    check_whole(name, batch, lowest=1)
    if batch % granularity:
        below = batch // granularity * granularity
        near = f"{below} or {below + granularity}" if below else f"{granularity}"
        raise ValueError(
            f"{name}={batch} must be a multiple of the batch granularity {granularity}; use {near}"
        )


def read(statistics: Mapping[str, float], name: str) -> float:
    """Returns a statistic as a Python number; raises ValueError if it is missing."""
    if name not in statistics:
        raise ValueError(
            f"the rule needs the statistic {name!r}, but it has only: {', '.join(statistics) or 'none'}"
        )
    return float(statistics[name])


def required(variance: float, square: float) -> float:
    """Returns variance / square, the batch size that a test requires.

    If the square is 0 but the variance is not, the result is infinite, which leads to the largest
    batch. If both are 0, or one is NaN, the result is 0, which does not change the batch.
    """
    if square == 0:
        return math.inf if variance > 0 else 0.0
    value = variance / square
    return 0.0 if math.isnan(value) else value
