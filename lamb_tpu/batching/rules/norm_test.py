r"""The norm test: the batch at which the gradient's variance is small beside its square.

References:
  Byrd, Chin, Nocedal, Wu, Sample size selection in optimization methods for machine learning,
  Mathematical Programming 134, 2012.
  Lau, Liu, Kolar, AdAdaGrad: Adaptive Batch Size Schemes for Adaptive Gradient Methods,
  arXiv:2402.11215; the authors' code, timlautk/AdAdaGrad, was read.
"""

import dataclasses
from collections.abc import Mapping

from lamb_tpu.batching import variance
from lamb_tpu.batching.rules.base import Bounded, read, required
from lamb_tpu.optim.checks import check_above_zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTest(Bounded):
    r"""Grows to :math:`\lceil \mathrm{tr}(\Sigma) / (\eta^2 |g|^2) \rceil`; never shrinks.

    Needs the statistics `variance` and `grad_sq` of `batching.variance`.

    >>> rule = NormTest(quantum=1, eta=0.5, upper=1024)
    >>> rule.next_batch(8, {'variance': 64.8, 'grad_sq': 14.9}, examples=0)
    18

    Attributes:
      eta: above 0; a smaller one wants larger batches.
    """

    needs = (variance.VARIANCE, variance.GRAD_SQ)

    eta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(eta=self.eta)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the present batch size, or what the test asks for if that is more."""
        grad_sq = read(statistics, variance.GRAD_SQ)
        return max(required(read(statistics, variance.VARIANCE), self.eta**2 * grad_sq), batch)
