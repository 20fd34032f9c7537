r"""The gradient noise scale, from squared norms of gradients at two batch sizes.

A mean gradient over :math:`B` examples has :math:`E|g_B|^2 = |G|^2 + \mathrm{tr}(\Sigma) / B`, with
the true gradient :math:`G` and the covariance :math:`\Sigma` of the examples' gradients. Two batch
sizes :math:`b < B` give both unknowns without bias:

.. math::
  |G|^2 &\approx \frac{B |g_B|^2 - b |g_b|^2}{B - b} \\
  \mathrm{tr}(\Sigma) &\approx \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B}

The noise scale is :math:`\mathrm{tr}(\Sigma) / |G|^2`, in examples. One pair of norms is noisy and
the ratio of two noisy numbers is biased, so both are averaged over updates, and then divided.

:math:`|g_b|^2` is best the mean over all the microbatches, or devices, of a batch: their number and
the sum of their squared norms add up over microbatches and devices.

References:
  McCandlish, Kaplan, Amodei, An Empirical Model of Large-Batch Training, arXiv:1812.06162,
  appendix A.1.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.optim.checks import check_above_zero, is_number

Value = Any  # a Python number, or a NumPy or JAX array of any shape, also traced


class Estimate(NamedTuple):
    """Squared norm of the true gradient, and trace of the covariance of one example's gradient."""

    grad_sq: Value  # may be negative: the estimate has no bias, but it has a variance
    trace: Value


class NoiseScaleState(NamedTuple):
    """Exponential averages that start at 0; divided by `weight` they have no bias."""

    weight: Value  # the average of 1
    grad_sq: Value
    trace: Value


def estimate(small_sq: Value, large_sq: Value, small: float, large: Value) -> Estimate:
    """Returns the unbiased pair from squared norms at two batch sizes.

    >>> estimate(small_sq=5.0, large_sq=2.0, small=4, large=16)
    Estimate(grad_sq=1.0, trace=16.0)

    Args:
      small_sq: squared norm of a mean gradient over `small` examples; better the mean of it over
        all parts of the large batch.
      large_sq: squared norm of the mean gradient over `large` examples.
      small: examples behind `small_sq`.
      large: examples behind `large_sq`; not checked if it is traced.

    Raises:
      ValueError: unless 0 < small < large.
    """
    check_above_zero(small=small)
    if not isinstance(large, jax.core.Tracer) and not small < large < math.inf:
        raise ValueError(
            f"small must be below large, as one batch size has no noise scale: {small} and {large}"
        )
    return Estimate(
        (large * large_sq - small * small_sq) / (large - small),
        (small_sq - large_sq) / (1 / small - 1 / large),
    )


def init() -> NoiseScaleState:
    """Returns the averages before the first estimate."""
    return NoiseScaleState(0.0, 0.0, 0.0)


def update(state: NoiseScaleState, new: Estimate, decay: float) -> NoiseScaleState:
    """Returns the averages with one more estimate.

    An estimate that is not finite, as from a gradient that overflowed, changes nothing.

    Args:
      state: of `init` or `update`.
      new: of `estimate`.
      decay: of the exponential averages, in [0, 1).

    Raises:
      ValueError: a decay out of range.
    """
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, not {decay!r}")
    xp = _library(*state, *new)
    finite = xp.isfinite(new.grad_sq) & xp.isfinite(new.trace)
    return NoiseScaleState(
        *(
            xp.where(finite, decay * old + (1 - decay) * value, old)
            for old, value in zip(state, (1.0, *new), strict=True)
        )
    )


def averages(state: NoiseScaleState) -> Estimate:
    """Returns both averages, corrected for their start at 0; NaN before the first estimate."""
    xp = _library(*state)
    weight = xp.where(state.weight > 0, state.weight, math.nan)
    return Estimate(state.grad_sq / weight, state.trace / weight)


def noise_scale(state: NoiseScaleState, floor: float = 0.0) -> Value:
    r"""Returns the noise scale in examples: the ratio of the averages.

    An average :math:`|G|^2` that is not above 0 says that the noise hides the gradient: what was
    averaged is too little, or the batch far below the noise scale. Both averages are raised to
    `floor`, and what is then divided by 0 is infinite. So the noise scale lies in [0, inf] by
    default, and a rule that follows it takes the largest batch that it may.

    >>> state = update(init(), Estimate(grad_sq=2.0, trace=6.0), decay=0.9)
    >>> round(float(noise_scale(state)), 6)
    3.0
    >>> float(noise_scale(update(state, Estimate(-9.0, 6.0), decay=0.9)))
    inf

    Args:
      state: of `update`.
      floor: of both averages, before the correction for their start; k-diffusion has 1e-8.
        `-math.inf` leaves them as they are, so that the ratio may be negative.

    Returns:
      The ratio, of the shape of the state's values; NaN before the first estimate.
    """
    xp = _library(*state)
    grad_sq, trace = xp.maximum(state.grad_sq, floor), xp.maximum(state.trace, floor)
    ratio = xp.where(grad_sq == 0, math.inf, trace / xp.where(grad_sq == 0, 1.0, grad_sq))
    return xp.where(state.weight > 0, ratio, math.nan)


def _library(*values: Value) -> Any:
    """NumPy for numbers of the host, which are float64; JAX for arrays of a device."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
