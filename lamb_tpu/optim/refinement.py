r"""The refined schedule: a learning rate computed from the gradient norms of a finished run.

Each sample of the gradient's norm has a weight, :math:`w_t = \|g_t\|_2^{-2}` for SGD and
:math:`w_t = \|g_t\|_1^{-1}` for Adam-like optimizers. The theoretical bound on the loss at the last
iterate is lowest for the schedule

.. math:: \eta_t \propto w_t \, \frac{\sum_{s > t} w_s}{\sum_s w_s}

The rate is small where gradients are large, for example in a warm-up, and falls to exactly 0. If
the norms are constant, the schedule is a straight line to zero.

References:
  Defazio, Cutkosky, Mehta, Mishchenko, When, Why and How Much? Adaptive Learning Rate Scheduling by
  Refinement, arXiv:2310.07831. Only the abstract and the authors' code,
  facebookresearch/adaptive_scheduling, were read.
"""

import bisect

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim.checks import check_above_zero, check_choices, check_whole, is_number, short

NORM_POWERS = {"l2": -2.0, "l1": -1.0}


def refined_schedule(
    gradient_norms: np.typing.ArrayLike,
    peak: float,
    total_steps: int | None = None,
    norm: str = "l2",
    smoothing: float = 0.1,
) -> optax.Schedule:
    """Returns a schedule computed from the gradient norms of a finished run.

    In this example the norms fall from 4 to 1 and then stay constant, so the rate starts low,
    rises, and then falls linearly to zero.

    >>> rate = refined_schedule([4., 2., 1., 1., 1., 1., 1.], peak=0.1, smoothing=0.)
    >>> print([round(float(rate(t)), 4) for t in range(8)])
    [0.0082, 0.0312, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0]

    Args:
      gradient_norms: samples of the norm of the full gradient, evenly spaced over a finished run,
        including the first and the last update; at least 2, finite and above 0.
      peak: the largest rate of the schedule.
      total_steps: the number of updates of the new run, over which the samples are interpolated; at
        least 2. None for the number of samples.
      norm: 'l2' for SGD with or without momentum; 'l1', with l1 norms, for Adam-like optimizers.
      smoothing: width of a median filter over the samples, as a fraction of the run; 0 for no
        filter. 0.1 in the authors' plots (visual.py).

    Returns:
      A function from the count of completed updates to the rate, float32 (float64 if JAX has it
      enabled). The rate is 0 at the last update and afterwards.
    """
    try:
        norms = np.asarray(gradient_norms, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"gradient_norms={short(gradient_norms)} must be numbers") from None
    if norms.ndim != 1 or norms.size < 2:
        raise ValueError(
            f"gradient_norms={short(gradient_norms)} must be a list of at least 2 numbers, not an "
            f"array of the shape {norms.shape}"
        )
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if bad.size:
        raise ValueError(f"gradient_norms[{bad[0]}]={norms[bad[0]]} must be finite and above 0")
    check_choices(norm=(norm, tuple(NORM_POWERS)))
    check_above_zero(peak=peak)
    if not is_number(smoothing) or not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing={smoothing!r} must be between 0 and 1")
    total_steps = norms.size if total_steps is None else total_steps
    check_whole("total_steps", total_steps, lowest=2)

    # The width must be odd, so that the filter has a middle.
    norms = _median_filter(norms, 2 * (int(smoothing * norms.size) // 2) + 1)
    weights = (norms / np.min(norms)) ** NORM_POWERS[norm]  # dividing by min avoids overflow
    remaining = np.cumsum(weights[::-1])[::-1]  # the sum of this weight and all later ones
    # The docstring's formula, up to a constant factor. The last rate is 0: no sample follows it.
    rates = weights * np.append(remaining[1:], 0.0)
    rates *= peak / rates.max()
    # The first update uses the first rate and the last update the last rate.
    samples_per_step = (norms.size - 1) / (total_steps - 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count).astype(jnp.result_type(float))
        positions = jnp.arange(rates.size, dtype=step.dtype)
        # After the last position `interp` returns the last rate, which is 0.
        return jnp.interp(step * samples_per_step, positions, jnp.asarray(rates, step.dtype))

    return schedule


def _median_filter(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the median of `width` (odd) values around each value.

    As in the authors' code, the first value is repeated before the start, and values are mirrored
    at the end.
    """
    half = width // 2
    padded = np.pad(np.pad(values, (0, half), mode="reflect"), (half, 0), mode="edge").tolist()
    # The window stays sorted as it moves: at each position one value leaves and another enters.
    window = sorted(padded[:width])
    medians = [window[half]]
    for leaving, entering in zip(padded, padded[width:], strict=False):
        del window[bisect.bisect_left(window, leaving)]
        bisect.insort(window, entering)
        medians.append(window[half])
    return np.asarray(medians)
