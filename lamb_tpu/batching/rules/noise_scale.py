"""A batch that follows the gradient noise scale.

References:
  McCandlish, Kaplan, Amodei, An Empirical Model of Large-Batch Training, arXiv:1812.06162.
"""

import dataclasses
from collections.abc import Mapping

from lamb_tpu.batching.rules.base import Bounded, read
from lamb_tpu.optim.checks import check_above_zero, check_range

NOISE_SCALE = "noise_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseScale(Bounded):
    """The noise scale times a factor, within the bounds, rounded up to whole quanta.

    Needs the statistic `noise_scale`, see `batching.noise_scale`. Before its first estimate, which
    is NaN, the batch stays; infinite, where noise hides the gradient, it gives the largest batch.

    >>> rule = NoiseScale(quantum=32, upper=4096)
    >>> [rule.next_batch(64, {'noise_scale': scale}, 0) for scale in (7.3, 300.0, float('inf'))]
    [32, 320, 4096]

    Attributes:
      factor: of the noise scale, above 0. At 1 a step makes half of the progress that the largest
        batch would, with twice the fewest examples.
      decay: of the averages behind the noise scale, see `batching.noise_scale.update`; the caller
        takes them.
    """

    needs = (NOISE_SCALE,)

    factor: float = 1.0
    decay: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(factor=self.factor)
        check_range("decay", self.decay, upper=1)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the noise scale times the factor."""
        del batch
        return self.factor * read(statistics, NOISE_SCALE)
