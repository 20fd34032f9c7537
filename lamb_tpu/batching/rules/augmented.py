r"""The augmented inner-product test: also the part of gradients across the mean is bounded.

References:
  Bollapragada, Byrd, Nocedal, Adaptive Sampling Strategies for Stochastic Optimization,
  arXiv:1710.11258.
  Lau, Liu, Kolar, AdAdaGrad, arXiv:2402.11215; the authors' code, timlautk/AdAdaGrad, was read.
"""

import dataclasses
from collections.abc import Mapping

from lamb_tpu.batching import variance
from lamb_tpu.batching.rules.base import read, required
from lamb_tpu.batching.rules.inner_product_test import InnerProductTest
from lamb_tpu.optim.checks import check_above_zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmented(InnerProductTest):
    r"""Grows to what the inner-product test or the orthogonality test wants; never shrinks.

    The latter is :math:`\lceil Var(g_i - \langle g_i, g \rangle g / |g|^2) / (\nu^2 |g|^2) \rceil`.
    Needs the statistics `inner_product_variance`, `orthogonal_variance` and `grad_sq` of
    `batching.variance`.

    >>> rule = Augmented(quantum=1, theta=0.1, nu=0.5, upper=1024)
    >>> rule.next_batch(8, {'inner_product_variance': 24.1, 'orthogonal_variance': 63.2,
    ...                     'grad_sq': 14.9}, examples=0)
    17

    Attributes:
      nu: above 0; a smaller one wants larger batches. Bollapragada et al. are recalled to have
        5.84, with theta 0.9.
    """

    needs = (variance.INNER_PRODUCT, variance.ORTHOGONAL, variance.GRAD_SQ)

    nu: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(nu=self.nu)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the present batch size, or what one of the tests asks for if that is more."""
        grad_sq = read(statistics, variance.GRAD_SQ)
        orthogonal = read(statistics, variance.ORTHOGONAL)
        return max(required(orthogonal, self.nu**2 * grad_sq), super().wanted(batch, statistics))
