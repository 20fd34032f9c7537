r"""The inner-product test: the batch at which most steps go downhill.

References:
  Bollapragada, Byrd, Nocedal, Adaptive Sampling Strategies for Stochastic Optimization,
  arXiv:1710.11258.
  Lau, Liu, Kolar, AdAdaGrad, arXiv:2402.11215; the authors' code, timlautk/AdAdaGrad, was read.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from lamb_tpu.batching import variance
from lamb_tpu.batching.rules.base import Bounded, read, required
from lamb_tpu.optim.checks import check_above_zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerProductTest(Bounded):
    r"""Grows to what the variance of the inner products asks for; never shrinks.

    That is :math:`\lceil Var(\langle g_i, g \rangle) / (\theta^2 |g|^4) \rceil`.
    Needs the statistics `inner_product_variance` and `grad_sq` of `batching.variance`.

    >>> rule = InnerProductTest(quantum=1, theta=0.1, upper=1024)
    >>> rule.next_batch(8, {'inner_product_variance': 24.1, 'grad_sq': 14.9}, examples=0)
    11

    Attributes:
      theta: above 0; a smaller one wants larger batches.
    """

    needs: ClassVar[tuple[str, ...]] = (variance.INNER_PRODUCT, variance.GRAD_SQ)

    theta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(theta=self.theta)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the present batch size, or what the test asks for if that is more."""
        grad_sq = read(statistics, variance.GRAD_SQ)
        inner_product = read(statistics, variance.INNER_PRODUCT)
        return max(required(inner_product, self.theta**2 * grad_sq**2), batch)
