r"""Rules with AdAdaGrad's tests, which require that gradients vary little relative to their mean.

References:
  Byrd, Chin, Nocedal, Wu, Sample size selection in optimization methods for machine learning,
  Mathematical Programming 134, 2012: the norm test.
  Bollapragada, Byrd, Nocedal, Adaptive Sampling Strategies for Stochastic Optimization,
  arXiv:1710.11258: the inner-product test, which makes most steps descent directions.
  Lau, Liu, Kolar, AdAdaGrad: Adaptive Batch Size Schemes for Adaptive Gradient Methods,
  arXiv:2402.11215; the authors' code, timlautk/AdAdaGrad, was read.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from lamb_tpu.batching import variance
from lamb_tpu.batching.rules.base import Bounded, read, required
from lamb_tpu.optim.checks import check_above_zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTest(Bounded):
    r"""Grows the batch to :math:`\lceil \mathrm{tr}(\Sigma) / (\eta^2 |g|^2) \rceil`; never shrinks it.

    Needs the statistics `variance` and `grad_sq` of `batching.variance`.

    >>> rule = NormTest(granularity=1, eta=0.5, upper=1024)
    >>> rule.next_batch(8, {'variance': 64.8, 'grad_sq': 14.9}, examples=0)
    18

    Attributes:
      eta: :math:`\eta`, above 0; smaller values lead to larger batches.
    """

    needs = (variance.VARIANCE, variance.GRAD_SQ)

    eta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(eta=self.eta)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the larger of the current batch size and the batch size that the test requires."""
        grad_sq = read(statistics, variance.GRAD_SQ)
        return max(required(read(statistics, variance.VARIANCE), self.eta**2 * grad_sq), batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerProductTest(Bounded):
    r"""Grows the batch if inner products of gradients with their mean vary much; never shrinks it.

    The test requires the batch size
    :math:`\lceil Var(\langle g_i, g \rangle) / (\theta^2 |g|^4) \rceil`.
    Needs the statistics `inner_product_variance` and `grad_sq` of `batching.variance`.

    >>> rule = InnerProductTest(granularity=1, theta=0.1, upper=1024)
    >>> rule.next_batch(8, {'inner_product_variance': 24.1, 'grad_sq': 14.9}, examples=0)
    11

    Attributes:
      theta: :math:`\theta`, above 0; smaller values lead to larger batches.
    """

    needs: ClassVar[tuple[str, ...]] = (variance.INNER_PRODUCT, variance.GRAD_SQ)

    theta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(theta=self.theta)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the larger of the current batch size and the batch size that the test requires."""
        grad_sq = read(statistics, variance.GRAD_SQ)
        inner_product = read(statistics, variance.INNER_PRODUCT)
        return max(required(inner_product, self.theta**2 * grad_sq**2), batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmented(InnerProductTest):
    r"""Grows the batch to the size at which the inner-product and orthogonality tests pass.

    The batch never shrinks. The orthogonality test limits the gradient components that are
    orthogonal to the mean. This test requires the batch size
    :math:`\lceil Var(g_i - \langle g_i, g \rangle g / |g|^2) / (\nu^2 |g|^2) \rceil`.
    Needs the statistics
    `inner_product_variance`, `orthogonal_variance` and `grad_sq` of `batching.variance`.

    >>> rule = Augmented(granularity=1, theta=0.1, nu=0.5, upper=1024)
    >>> rule.next_batch(8, {'inner_product_variance': 24.1, 'orthogonal_variance': 63.2,
    ...                     'grad_sq': 14.9}, examples=0)
    17

    Attributes:
      nu: :math:`\nu`, above 0; smaller values lead to larger batches. Bollapragada et al. use 5.84 with
        theta 0.9 (from memory; the paper was not checked).
    """

    needs = (variance.INNER_PRODUCT, variance.ORTHOGONAL, variance.GRAD_SQ)

    nu: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(nu=self.nu)

    def wanted(self, batch: int, statistics: Mapping[str, float]) -> float:
        """Returns the largest of the current batch size and the two batch sizes that the tests require."""
        grad_sq = read(statistics, variance.GRAD_SQ)
        orthogonal = read(statistics, variance.ORTHOGONAL)
        return max(required(orthogonal, self.nu**2 * grad_sq), super().wanted(batch, statistics))
