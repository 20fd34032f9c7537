"""A batch size that is a function of the examples seen: steps, or straight lines between points.

"Do not decay the rate, grow the batch", batch warm-up and Seesaw are such functions.

References:
  Smith et al., Don't Decay the Learning Rate, Increase the Batch Size, arXiv:1711.00489.
  Meterez et al., Seesaw: Accelerating Training by Balancing Learning Rate and Batch Size
  Scheduling, arXiv:2510.14717: its abstract was read and the paper was not.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lamb_tpu.batching.rules.base import Rule, check_quanta
from lamb_tpu.optim.checks import check_flag, check_whole, is_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp(Rule):
    """Batch sizes at points in examples seen.

    >>> ramp = Ramp(quantum=8, points=((0, 8), (100, 16), (300, 64)))
    >>> [ramp.next_batch(8, {}, examples) for examples in (0, 99, 100, 299, 300, 900)]
    [8, 8, 16, 16, 64, 64]
    >>> ramp = dataclasses.replace(ramp, linear=True)
    >>> [ramp.next_batch(8, {}, examples) for examples in (0, 99, 100, 200, 299, 900)]
    [8, 8, 16, 40, 56, 64]

    Attributes:
      points: pairs (examples seen, batch size from there on), the first at 0 examples.
      linear: straight lines between the points, rounded down to whole quanta, as in batch warm-up.
    """

    points: tuple[tuple[int, int], ...]
    linear: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("linear", self.linear)
        points = self.points
        if (
            not isinstance(points, Sequence)
            or not points
            or not all(isinstance(point, Sequence) and len(point) == 2 for point in points)
        ):
            raise ValueError(f"points must be pairs (examples seen, batch size), not {points!r}")
        for examples, batch in points:
            check_whole("the examples of a point", examples)
            check_quanta(f"the batch at {examples} examples", batch, self.quantum)
        places = [examples for examples, _ in points]
        if places[0] != 0 or any(a >= b for a, b in itertools.pairwise(places)):
            raise ValueError(f"points must begin at 0 examples and then rise, not {places}")

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the batch size at so many examples."""
        del batch, statistics
        index = bisect.bisect_right(self.points, examples, key=lambda point: point[0]) - 1
        start, here = self.points[index]
        if not self.linear or index == len(self.points) - 1:
            return here
        end, there = self.points[index + 1]
        between = here + (there - here) * (examples - start) // (end - start)
        return between // self.quantum * self.quantum


class Seesaw(NamedTuple):
    """Factors of learning rate and batch size where a schedule would divide its rate."""

    rate: float
    batch: float


def seesaw(decay: float) -> Seesaw:
    r"""Returns Seesaw's factors where a schedule would divide its rate by `decay`.

    The rate is divided by the root of it and the batch multiplied by it. The abstract has
    :math:`1 / \sqrt 2` and 2 for a rate that would be halved; other factors follow the same rule.
    So the schedule stays as it is, in examples, and the rate follows the batch by 'sqrt', see
    `learning_rate.rate_factor`: :math:`\sqrt{2} / 2 = 1 / \sqrt 2`.

    >>> seesaw(4.0)
    Seesaw(rate=0.5, batch=4.0)

    Raises:
      ValueError: unless decay is at least 1.
    """
    if not is_number(decay) or not 1 <= decay < math.inf:
        raise ValueError(f"decay must be at least 1, not {decay!r}")
    return Seesaw(1 / math.sqrt(decay), float(decay))


def seesaw_points(
    batch: int, cuts: Sequence[int], decay: float, quantum: int
) -> tuple[tuple[int, int], ...]:
    """Returns the points of a `Ramp` that grows at each cut of a rate by Seesaw's factor.

    >>> seesaw_points(64, [1000, 2000], decay=2.0, quantum=32)
    ((0, 64), (1000, 128), (2000, 256))

    Args:
      batch: in examples, with which training begins.
      cuts: the examples seen at which the schedule divides its rate.
      decay: by which it does.
      quantum: batch sizes are rounded to the nearest whole number of quanta.
    """
    factor = seesaw(decay).batch
    return (
        (0, batch),
        *(
            (cut, max(1, round(batch * factor ** (index + 1) / quantum)) * quantum)
            for index, cut in enumerate(cuts)
        ),
    )
