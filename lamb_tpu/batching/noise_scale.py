r"""The gradient noise scale, from squared norms of gradients at two batch sizes.

A mean gradient over :math:`B` examples has :math:`E|g_B|^2 = |G|^2 + \mathrm{tr}(\Sigma) / B`, with
the true gradient :math:`G` and the covariance :math:`\Sigma` of per-example gradients. Two batch
sizes :math:`b < B` give unbiased estimates of both unknowns:

.. math::
  |G|^2 &\approx \frac{B |g_B|^2 - b |g_b|^2}{B - b} \\
  \mathrm{tr}(\Sigma) &\approx \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B}

The noise scale is :math:`\mathrm{tr}(\Sigma) / |G|^2`, in examples. The estimates of an update are
noisy, and the ratio of two noisy numbers is biased, so both estimates are averaged over updates
before the division.

The best estimate of :math:`|g_b|^2` is the mean over all parts of a batch: the microbatches, or the
rows of each device. To compute this mean, sum the squared norms of the parts' gradients, and
the number of parts, over microbatches and devices.

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

# The names of the metrics that record the two fields of an update's `Estimate`.
PAIR = "noise_scale/grad_sq", "noise_scale/trace"

Value = Any  # a Python number, or a NumPy or JAX array of any shape, possibly traced


class Estimate(NamedTuple):
    """Unbiased estimates of two quantities; both can be negative, because they are noisy."""

    grad_sq: Value  # the squared norm of the true gradient
    trace: Value  # the trace of the covariance of per-example gradients


class NoiseScaleState(NamedTuple):
    """Exponential moving averages that start at 0; divide them by `weight` to correct this bias."""

    weight: Value  # the moving average of the constant 1
    grad_sq: Value
    trace: Value


def estimate(small_sq: Value, large_sq: Value, small: float, large: Value) -> Estimate:
    """Returns the pair of unbiased estimates, from squared norms at two batch sizes.

    >>> estimate(small_sq=5.0, large_sq=2.0, small=4, large=16)
    Estimate(grad_sq=1.0, trace=16.0)

    Args:
      small_sq: the squared norm of a mean gradient over `small` examples; preferably the mean of
        this squared norm over all parts of the large batch.
      large_sq: the squared norm of the mean gradient over `large` examples.
      small: the number of examples for `small_sq`, above 0.
      large: the number of examples for `large_sq`, above `small`; not checked if it is traced.

    Raises:
      ValueError: `small` is not above 0, or `large` is not above `small`.
    """
    check_above_zero(small=small)
    if not isinstance(large, jax.core.Tracer) and not small < large < math.inf:
        raise ValueError(
            f"small={small} must be below large={large}, because a noise scale needs two batch "
            "sizes"
        )
    return Estimate(
        (large * large_sq - small * small_sq) / (large - small),
        (small_sq - large_sq) / (1 / small - 1 / large),
    )


def init() -> NoiseScaleState:
    """Returns the averages before the first estimate."""
    return NoiseScaleState(0.0, 0.0, 0.0)


def update(state: NoiseScaleState, new: Estimate, decay: float) -> NoiseScaleState:
    """Returns the moving averages after one more estimate.

    If the estimate is not finite, for example after an overflow, the averages do not change.
    `decay` is the decay per update, in [0, 1). Raises ValueError if it is out of range.
    """
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(f"decay={decay!r} must be at least 0 and below 1")
    xp = _library(*state, *new)
    finite = xp.isfinite(new.grad_sq) & xp.isfinite(new.trace)
    return NoiseScaleState(
        *(
            xp.where(finite, decay * old + (1 - decay) * value, old)
            for old, value in zip(state, (1.0, *new), strict=True)
        )
    )


def averages(state: NoiseScaleState) -> Estimate:
    """Returns both averages, corrected for the bias of a start at 0; NaN before the first estimate."""
    xp = _library(*state)
    weight = xp.where(state.weight > 0, state.weight, math.nan)
    return Estimate(state.grad_sq / weight, state.trace / weight)


def noise_scale(state: NoiseScaleState, floor: float = 0.0) -> Value:
    r"""Returns the noise scale in examples: the ratio of the averages.

    If the average of :math:`|G|^2` is not above 0, noise hides the gradient: there are too few
    estimates, or the batch is far below the noise scale. Averages below `floor` are replaced by
    `floor`, and a division by 0 gives infinity. By default the noise scale therefore lies in
    [0, inf]. If it is infinite, a rule that follows the noise scale takes its largest batch.

    >>> state = update(init(), Estimate(grad_sq=2.0, trace=6.0), decay=0.9)
    >>> round(float(noise_scale(state)), 6)
    3.0
    >>> float(noise_scale(update(state, Estimate(-9.0, 6.0), decay=0.9)))
    inf

    Args:
      state: result of `update`; before the first estimate the ratio is NaN.
      floor: the lower bound of both averages before bias correction; 1e-8 in k-diffusion. With
        `-math.inf` there is no bound, and the ratio may be negative.
    """
    xp = _library(*state)
    grad_sq, trace = xp.maximum(state.grad_sq, floor), xp.maximum(state.trace, floor)
    ratio = xp.where(grad_sq == 0, math.inf, trace / xp.where(grad_sq == 0, 1.0, grad_sq))
    return xp.where(state.weight > 0, ratio, math.nan)


def _library(*values: Value) -> Any:
    """Returns `jnp` if a value is a JAX array, else `np`, which computes in float64 on the host."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
