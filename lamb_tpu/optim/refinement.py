r"""The refined schedule: a learning rate computed from the gradient norms of a finished run.

With one weight for each reading of the gradient's norm, :math:`w_t = \|g_t\|_2^{-2}` for SGD and
:math:`w_t = \|g_t\|_1^{-1}` for Adam and its kin, theory bounds the last iterate best for

.. math:: \eta_t \propto w_t \, \frac{\sum_{s > t} w_s}{\sum_s w_s}

so the rate is small where gradients are large, which gives a warm-up where a run needs one, and it
falls to exactly 0. Norms that do not change give the straight line to zero.

References:
  Defazio, Cutkosky, Mehta, Mishchenko, When, Why and How Much? Adaptive Learning Rate Scheduling by
  Refinement, arXiv:2310.07831: the abstract was read, and the authors' code,
  facebookresearch/adaptive_scheduling.
"""

import bisect

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim.checks import check_above_zero, check_choice, check_whole, is_number, short

NORM_POWERS = {"l2": -2.0, "l1": -1.0}


def refined_schedule(
    gradient_norms: np.typing.ArrayLike,
    peak: float,
    total_steps: int | None = None,
    norm: str = "l2",
    smoothing: float = 0.1,
) -> optax.Schedule:
    """Returns a schedule computed from the gradient norms of a finished run.

    Norms of 4 that fall to 1, then stay: the rate starts low, rises and goes to zero in a line.

    >>> rate = refined_schedule([4., 2., 1., 1., 1., 1., 1.], peak=0.1, smoothing=0.)
    >>> print([round(float(rate(t)), 4) for t in range(8)])
    [0.0082, 0.0312, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0]

    Args:
      gradient_norms: readings of the norm of the whole gradient, evenly spaced over a finished run,
        the first and the last update among them; at least 2, finite and above 0.
      peak: the largest rate of the schedule.
      total_steps: updates of the new run, over which the readings are stretched; at least 2. None:
        as many as there are readings.
      norm: 'l2' for SGD with or without momentum; 'l1', with l1 norms, for Adam and its kin.
      smoothing: width of a median filter over the readings, as a part of the run; 0 is none. 0.1 in
        the authors' plots (visual.py).

    Returns:
      A function of the count of completed updates to the rate, float32 (float64 where JAX has it
      enabled). The last update and all after it have 0.

    Raises:
      ValueError: readings or arguments out of range.
    """
    try:
        norms = np.asarray(gradient_norms, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"gradient_norms must be numbers, not {short(gradient_norms)}") from None
    if norms.ndim != 1 or norms.size < 2:
        raise ValueError(
            f"gradient_norms must be a row of at least 2, not of shape {norms.shape}: "
            f"{short(gradient_norms)}"
        )
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if bad.size:
        raise ValueError(
            f"gradient_norms must be finite and above 0; number {bad[0]} is {norms[bad[0]]}"
        )
    check_choice("norm", norm, tuple(NORM_POWERS))
    check_above_zero(peak=peak)
    if not is_number(smoothing) or not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must lie in 0..1, not {smoothing!r}")
    total_steps = norms.size if total_steps is None else total_steps
    check_whole("total_steps", total_steps, lowest=2)

    # An odd width, so that the filter has a middle.
    norms = _median_filter(norms, 2 * (int(smoothing * norms.size) // 2) + 1)
    weights = (norms / np.min(norms)) ** NORM_POWERS[norm]  # the scale falls out, without overflow
    behind = np.cumsum(weights[::-1])[::-1]  # the sum of this weight and all later ones
    # The formula of the docstring up to a factor: the last reading has no later ones, hence 0.
    rates = weights * np.append(behind[1:], 0.0)
    rates *= peak / rates.max()
    # The first update reads the first rate and the last update the last one.
    readings_a_step = (norms.size - 1) / (total_steps - 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count).astype(jnp.result_type(float))
        places = jnp.arange(rates.size, dtype=step.dtype)
        # Behind the last place `interp` stays at the last rate, which is 0.
        return jnp.interp(step * readings_a_step, places, jnp.asarray(rates, step.dtype))

    return schedule


def _median_filter(values: np.ndarray, width: int) -> np.ndarray:
    """The median of `width` (odd) values around each; the authors' code mirrors the end.

    Before the start the first value is repeated, after the end the values run back.
    """
    half = width // 2
    padded = np.pad(np.pad(values, (0, half), mode="reflect"), (half, 0), mode="edge").tolist()
    # The window is kept sorted while it moves: one value leaves and one enters at each place.
    window = sorted(padded[:width])
    medians = [window[half]]
    for leaving, entering in zip(padded, padded[width:], strict=False):
        del window[bisect.bisect_left(window, leaving)]
        bisect.insort(window, entering)
        medians.append(window[half])
    return np.asarray(medians)
