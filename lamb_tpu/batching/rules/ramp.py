"""A batch size that is a function of the examples seen: steps, or straight lines between points.

Three methods have this form: increasing the batch size instead of decaying the learning rate, batch
warm-up, and Seesaw.

References:
  Smith et al., Don't Decay the Learning Rate, Increase the Batch Size, arXiv:1711.00489.
  Meterez et al., Seesaw: Accelerating Training by Balancing Learning Rate and Batch Size
  Scheduling, arXiv:2510.14717; only the abstract was read.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lamb_tpu.batching.rules.base import Rule, check_granularity
from lamb_tpu.optim.checks import check_flag, check_whole, is_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp(Rule):
    """Sets the batch size as a function of the number of examples seen.

    >>> ramp = Ramp(granularity=8, points=((0, 8), (100, 16), (300, 64)))
    >>> [ramp.next_batch(8, {}, examples) for examples in (0, 99, 100, 299, 300, 900)]
    [8, 8, 16, 16, 64, 64]
    >>> ramp = dataclasses.replace(ramp, linear=True)
    >>> [ramp.next_batch(8, {}, examples) for examples in (0, 99, 100, 200, 299, 900)]
    [8, 8, 16, 40, 56, 64]

    Attributes:
      points: pairs (examples seen, batch size from then on), the first at 0 examples.
      linear: whether to interpolate linearly between the points, rounded down to multiples of the
        granularity, as in batch warm-up.
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
            raise ValueError(f"points={points!r} must be a list of pairs (examples, batch size)")
        for index, (examples, batch) in enumerate(points):
            check_whole(f"points[{index}][0]", examples)
            check_granularity(f"points[{index}][1]", batch, self.granularity)
        starts = [examples for examples, _ in points]
        if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"points={points!r} must have strictly increasing numbers of examples that begin at 0"
            )

    def next_batch(self, batch: int, statistics: Mapping[str, float], examples: int) -> int:
        """Returns the batch size after `examples` examples."""
        del batch, statistics
        index = bisect.bisect_right(self.points, examples, key=lambda point: point[0]) - 1
        start, here = self.points[index]
        if not self.linear or index == len(self.points) - 1:
            return here
        end, there = self.points[index + 1]
        between = here + (there - here) * (examples - start) // (end - start)
        return between // self.granularity * self.granularity


class Seesaw(NamedTuple):
    """Factors of learning rate and batch size at a point where a schedule would divide the rate."""

    rate: float
    batch: float


def seesaw(decay: float) -> Seesaw:
    r"""Returns Seesaw's factors at a point where a schedule would divide the rate by `decay`.

    The rate is divided by the square root of `decay`, and the batch size is multiplied by `decay`.
    The abstract gives the factors :math:`1 / \sqrt 2` and 2 for a rate that would be halved; for
    other values of `decay` the same rule is used here. To train with these factors, do not change
    the schedule, and let the rate follow the batch size by 'sqrt', see `learning_rate.rate_factor`:
    if the schedule halves the rate and the batch size doubles, the rate has the factor
    :math:`\sqrt{2} / 2 = 1 / \sqrt 2`.

    >>> seesaw(4.0)
    Seesaw(rate=0.5, batch=4.0)
    """
    if not is_number(decay) or not 1 <= decay < math.inf:
        raise ValueError(f"decay={decay!r} must be finite and at least 1")
    return Seesaw(1 / math.sqrt(decay), float(decay))


def seesaw_points(
    batch: int, cuts: Sequence[int], decay: float, granularity: int
) -> tuple[tuple[int, int], ...]:
    """Returns the points of a `Ramp` that grows by Seesaw's factor where a schedule cuts the rate.

    >>> seesaw_points(64, [1000, 2000], decay=2.0, granularity=32)
    ((0, 64), (1000, 128), (2000, 256))

    Args:
      batch: the initial batch size, in examples.
      cuts: the numbers of examples after which the schedule divides its rate.
      decay: the divisor of the rate.
      granularity: the batch granularity; batch sizes are rounded to the nearest multiple of it.
    """
    factor = seesaw(decay).batch
    return (
        (0, batch),
        *(
            (cut, max(1, round(batch * factor ** (index + 1) / granularity)) * granularity)
            for index, cut in enumerate(cuts)
        ),
    )
