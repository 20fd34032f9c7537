"""A rule by which the batch size follows the gradient noise scale.

References:
  McCandlish, Kaplan, Amodei, An Empirical Model of Large-Batch Training, arXiv:1812.06162.
"""

import dataclasses
from collections.abc import Mapping

from lamb_tpu.batching.rules.base import DECAY, NOISE_SCALE, Bounded, read
from lamb_tpu.optim.checks import check_above_zero, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseScale(Bounded):
    """Sets the batch to the noise scale times a factor, within bounds, rounded up to the granularity.

    Needs the statistic `noise_scale`, see `batching.noise_scale`. Before the first estimate the
    noise scale is NaN, and the batch size does not change. If noise hides the gradient, the noise
    scale is infinite, and the batch size becomes `upper`.

    >>> rule = NoiseScale(granularity=32, upper=4096)
    >>> [rule.next_batch(64, {'noise_scale': scale}, 0) for scale in (7.3, 300.0, float('inf'))]
    [32, 320, 4096]

    Attributes:
      factor: the factor of the noise scale, above 0. With 1 a step makes half the progress of a
        step with an unlimited batch, and a run needs twice the minimum number of examples.
      decay: the decay of the moving averages in the noise scale, see `batching.noise_scale.update`.
    """

    needs = (NOISE_SCALE,)

    factor: float = 1.0
    decay: float = DECAY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(factor=self.factor)
        check_range("decay", self.decay, upper=1)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the noise scale times the factor."""
        del batch
        return self.factor * read(statistics, NOISE_SCALE)
