"""Learning-rate schedules: warm-up, hold, decay, and consecutive phases.

As in Optax, a schedule is a function of the number of completed updates: the first update of a run
evaluates the schedule at 0, and the last of `total_steps` updates at `total_steps - 1`. `by_examples`
converts a schedule that is a function of the number of examples seen.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import checks

# Each function maps the remaining fraction of the decay, which falls from 1 to 0, to a fraction of
# the peak rate. The second argument is `power`.
DECAYS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "polynomial": lambda left, power: left**power,
    # (1 - cos pi x) / 2, written without cancellation near the end.
    "cosine": lambda left, power: jnp.sin(0.5 * jnp.pi * left) ** 2,
    "constant": lambda left, power: jnp.ones_like(left),
}


def warmup(
    peak: float,
    total_steps: float,
    warmup_steps: float = 0.0,
    decay: str | optax.Schedule = "polynomial",
    power: float = 1.0,
    end_value: float = 0.0,
    decay_from: str = "warmup",
    *,
    start_value: float = 0.0,
    warmup_power: float = 1.0,
    hold_steps: float = 0.0,
    min_value: float = 0.0,
    first_step: float = 0.0,
) -> optax.Schedule:
    r"""Returns a warm-up to a peak, then a decay that reaches `end_value` at `total_steps`.

    With W = `warmup_steps`, H = `hold_steps` and T = `total_steps`, update t has the rate

    .. math::
      \eta(t) = \begin{cases}
        \text{start} + (\text{peak} - \text{start}) \, (t / W)^{\text{warmup power}} & t < W \\
        \text{peak} & W \le t < W + H \\
        \text{end} + (\text{peak} - \text{end}) \, d\!\left(\frac{T - t}{T - S}\right) & t \ge W + H
      \end{cases}

    S is the start of the decay. d is :math:`x^p` for 'polynomial', :math:`(1 - \cos \pi x) / 2` for
    'cosine' and 1 for 'constant'. From T on, the rate is `end_value` for 'polynomial' and 'cosine',
    and the peak for 'constant'; a decay that is a function is used after T too. Therefore:

    - With a warm-up the first update has the rate 0 and changes nothing, as in the authors' code;
      set `start_value` or `first_step=1` to avoid this.
    - The last update is t = T - 1, so no update of the run has the rate `end_value` itself.
    - With `decay_from='warmup'`, S = W + H. If W is whole, the rate reaches the peak at t = W.
    - With `decay_from='zero'`, S = 0, so the decay starts together with the warm-up, as in the BERT
      and LAMB authors' code. The rate drops at the end of the warm-up and never reaches the peak.

    The defaults are a linear decay and no warm-up, so the rate falls on a straight line to zero.
    With a warm-up, which is linear by default, the schedule is the one-cycle triangle.

    >>> rate = warmup(0.04, total_steps=8, warmup_steps=4)
    >>> print([round(float(rate(t)), 3) for t in range(9)])
    [0.0, 0.01, 0.02, 0.03, 0.04, 0.03, 0.02, 0.01, 0.0]
    >>> rate = warmup(0.04, total_steps=8, warmup_steps=4, decay_from='zero')
    >>> print([round(float(rate(t)), 3) for t in range(9)])
    [0.0, 0.01, 0.02, 0.03, 0.02, 0.015, 0.01, 0.005, 0.0]

    Decays that do not depend on T are separate functions, `exponential_decay` and `step_decay`:

    >>> rate = warmup(0.1, 90, 5, decay=step_decay([30, 60, 80], 0.1), decay_from='zero')
    >>> print([round(float(rate(t)), 6) for t in (0, 4, 5, 29, 30, 60, 80, 89)])
    [0.0, 0.08, 0.1, 0.1, 0.01, 0.001, 0.0001, 0.0001]

    Args:
      peak: the rate at the end of warm-up.
      total_steps: T, in updates; need not be whole.
      warmup_steps: W, in updates, at most T; need not be whole. If W = T, the full run is a
        warm-up: the rate approaches the peak, and with `first_step=1` the last update has the peak
        rate.
      decay: 'polynomial', 'cosine', 'constant', or a function that maps the number of updates since
        S to a fraction of the peak.
      power: p, for 'polynomial' only; 1 in the LAMB paper, 2 for LARS.
      end_value: the rate at T for 'polynomial' and 'cosine'. A decay that is a function
        multiplies the peak minus `end_value`, and `end_value` is added.
      decay_from: 'warmup' or 'zero', see above.
      start_value: the rate at the start of the warm-up, t = 0. Goyal et al. (arXiv:1706.02677)
        start from the rate of the base batch size.
      warmup_power: the exponent of t / W; with 1 the warm-up is linear.
      hold_steps: H, the number of updates at the peak between warm-up and decay; need not be whole.
        W + H must be at most T.
      min_value: a lower bound on the full schedule.
      first_step: t at the first update. For later updates, the number of completed updates is
        added. NVIDIA's BERT and Jasper start at 1, so that no update is wasted at a rate of 0.

    Returns:
      A function from the number of completed updates (an int or an integer array, also traced) to
      the rate, float32 (float64 if JAX has it enabled).

    Raises:
      ValueError: an argument is out of range, or has no effect with the chosen decay.
    """
    if not callable(decay) and not (isinstance(decay, str) and decay in DECAYS):
        raise ValueError(
            f"decay={decay!r} is unknown; use one of {', '.join(DECAYS)}, or a function such as "
            "exponential_decay(...)"
        )
    if not isinstance(decay_from, str) or decay_from not in ("warmup", "zero"):
        raise ValueError(f"decay_from={decay_from!r} must be 'warmup' or 'zero'")
    checks.check_above_zero(total_steps=total_steps, power=power, warmup_power=warmup_power)
    checks.checked(warmup, locals())
    shown = "a function as decay" if callable(decay) else f"decay={decay!r}"
    if decay != "polynomial" and power != 1.0:
        raise ValueError(f"power={power!r} has no effect with {shown}; leave it out")
    if decay == "constant" and end_value != 0.0:
        raise ValueError(f"end_value={end_value!r} has no effect with {shown}; leave it out")
    peak_ends = warmup_steps + hold_steps
    _check_lengths(warmup_steps, hold_steps, total_steps)
    # S and T - S of the formula.
    start = peak_ends if decay_from == "warmup" else 0.0
    length = total_steps - start

    def peak_fraction(step: jax.Array) -> jax.Array:
        if callable(decay):
            return decay(jnp.maximum(step - start, 0.0))
        # Compute (T - t) / (T - S) and not 1 - (t - S) / (T - S), which loses digits near the end.
        # If the warm-up is as long as the run, there is no decay, and the fraction is 0 at any
        # step.
        left = jnp.clip((total_steps - step) / length, 0.0, 1.0) if length > 0 else 0.0 * step
        return DECAYS[decay](left, power)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = _clock(count) + first_step
        rate = end_value + (peak - end_value) * peak_fraction(step)
        # The hold overrides the decay, and the warm-up overrides both.
        if hold_steps:
            rate = jnp.where(step < peak_ends, peak, rate)
        if warmup_steps:
            rising = (step / warmup_steps) ** warmup_power
            rate = jnp.where(step < warmup_steps, start_value + (peak - start_value) * rising, rate)
        return jnp.maximum(rate, min_value) if min_value else rate

    return schedule


def _check_lengths(warmup_steps: float, hold_steps: float, total_steps: float) -> None:
    if warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps!r} is longer than total_steps={total_steps!r}, so the "
            f"rate would never reach its peak; use at most {total_steps!r}"
        )
    if hold_steps and warmup_steps + hold_steps > total_steps:
        raise ValueError(
            f"hold_steps={hold_steps!r} plus warmup_steps={warmup_steps!r} must be at most "
            f"total_steps={total_steps!r}"
        )


def exponential_decay(factor: float, every_steps: float, staircase: bool = True) -> optax.Schedule:
    """Returns the decay `factor` ** (t / `every_steps`) for `warmup(decay=...)`.

    >>> part = exponential_decay(0.5, every_steps=10)
    >>> print([float(part(t)) for t in (0, 9, 10, 20)])
    [1.0, 1.0, 0.5, 0.25]

    Args:
      factor: above 0 and at most 1; 0.97 in EfficientNet.
      every_steps: the number of updates after which the factor applies once more; need not be
        whole. 2.4 epochs in EfficientNet.
      staircase: True to drop by the full factor every `every_steps` updates, False to decay
        smoothly.

    Returns:
      A function that maps the number of updates since the start of the decay to a fraction of the
      peak.

    Raises:
      ValueError: an argument is out of range.

    References:
      Tan and Le's training code, tensorflow/tpu, models/official/efficientnet/utils.py.
    """
    _check_factor(factor)
    checks.check_above_zero(every_steps=every_steps)
    checks.check_flag("staircase", staircase)

    def part(count: jax.typing.ArrayLike) -> jax.Array:
        periods = _clock(count) / every_steps
        if staircase:
            # In float32, 12513 / 1251.3 is slightly below 10. Without a correction by 4 eps, the
            # drop would come one update late.
            periods = jnp.floor(periods * (1.0 + 4.0 * jnp.finfo(periods.dtype).eps))
        return jnp.power(factor, periods)

    return part


def step_decay(boundaries: Sequence[float], factor: float) -> optax.Schedule:
    """Returns the decay `factor` ** (number of boundaries reached) for `warmup(decay=...)`.

    Goyal et al. (arXiv:1706.02677) multiply the rate by 0.1 at epochs 30, 60 and 80 of 90. They
    count epochs from the start of the run; use `decay_from='zero'` in `warmup` for this.

    >>> part = step_decay([30, 60, 80], 0.1)
    >>> print([round(float(part(t)), 6) for t in (29, 30, 60, 80)])
    [1.0, 0.1, 0.01, 0.001]

    Args:
      boundaries: numbers of updates, positive and strictly increasing; need not be whole. The
        update at a boundary is the first with the lower rate.
      factor: above 0 and at most 1.

    Returns:
      A function that maps the number of updates since the start of the decay to a fraction of the
      peak.

    Raises:
      ValueError: the boundaries or the factor are invalid.
    """
    _check_factor(factor)
    try:
        edges = np.asarray(boundaries, np.float64)
    except (TypeError, ValueError):
        edges = np.empty(0)
    finite = edges.ndim == 1 and edges.size > 0 and np.isfinite(edges).all()
    if not finite or not np.all(np.diff(edges, prepend=0.0) > 0):
        raise ValueError(f"boundaries={boundaries!r} must be positive and strictly increasing")

    def part(count: jax.typing.ArrayLike) -> jax.Array:
        step = _clock(count)
        # A new last axis compares each count with all boundaries: (..., boundaries).
        reached = jnp.sum(step[..., None] >= edges.astype(step.dtype), axis=-1)
        return jnp.power(factor, reached.astype(step.dtype))

    return part


def phases(*parts: tuple[optax.Schedule, int]) -> optax.Schedule:
    """Joins schedules one after the other; each starts at t = 0, so every phase can have a warm-up.

    This example is NVIDIA's BERT with the LAMB paper's mixed-batch recipe. The first phase has
    batches of 64K examples with 128 tokens each, the second has batches of 32K examples with 512
    tokens each:

    >>> first = warmup(6e-3, 7038, 0.2843 * 7038, power=0.5, decay_from='zero', first_step=1)
    >>> second = warmup(4e-3, 1563, 0.128 * 1563, power=0.5, decay_from='zero', first_step=1)
    >>> rate = phases((first, 7038), (second, 1563))
    >>> print([round(float(rate(t)), 6) for t in (0, 2000, 7037, 7038, 7238, 8599)])
    [3e-06, 0.005076, 0.0, 2e-05, 0.003734, 0.000101]

    Args:
      *parts: pairs of a schedule and the number of updates of its phase, a whole number of at least
        1.

    Returns:
      The schedule of the full run. The last schedule is also used after the last phase.

    Raises:
      ValueError: there is no pair, or a pair is invalid.
    """
    if not parts:
        raise ValueError("phases needs at least one pair (schedule, steps)")
    for index, part in enumerate(parts):
        if not checks.is_pair(part):
            raise ValueError(f"parts[{index}]={part!r} must be a pair (schedule, steps)")
        schedule, steps = part
        if not callable(schedule):
            raise ValueError(f"the schedule of parts[{index}]={part!r} must be a function")
        if not checks.is_number(steps) or not 1 <= steps < math.inf or int(steps) != steps:
            raise ValueError(
                f"the steps of parts[{index}]={part!r} must be a whole number of at least 1"
            )
    ends = np.cumsum([int(steps) for _, steps in parts[:-1]], dtype=int).tolist()
    return optax.join_schedules([schedule for schedule, _ in parts], ends)


def by_examples(
    schedule: optax.Schedule, batch_size: int | Sequence[tuple[int, int]]
) -> optax.Schedule:
    """Converts a schedule over examples seen into a schedule over completed updates.

    If the batch size changes during a run, an epoch has no fixed number of updates. Then specify
    every length of the schedule in examples. Here the batch size is 128 for 10 updates and then
    256:

    >>> rate = warmup(0.1, total_steps=6_400, warmup_steps=1_280)
    >>> grown = by_examples(rate, [(128, 10), (256, 20)])
    >>> print([round(float(grown(t)), 4) for t in (0, 5, 10, 20, 30)])
    [0.0, 0.05, 0.1, 0.05, 0.0]

    Args:
      schedule: a function from the number of examples seen before an update to the rate.
      batch_size: examples per update; or pairs (batch size, number of updates) in order. The last
        batch size continues to the end.

    Returns:
      A function from the number of completed updates to the rate. The number of examples is rounded
      to float32 (float64 if JAX has it enabled).

    Raises:
      ValueError: `schedule` is not a function, or `batch_size` is invalid.
    """
    if not callable(schedule):
        raise ValueError(f"schedule={schedule!r} must be a function of the number of examples")
    pairs: Any = batch_size
    if checks.is_number(batch_size):
        checks.check_whole("batch_size", batch_size, lowest=1)
        pairs = [(batch_size, 1)]
    elif not isinstance(batch_size, (tuple, list)) or not batch_size:
        raise ValueError(
            f"batch_size={batch_size!r} must be a number or a list of pairs (batch size, updates)"
        )
    for index, pair in enumerate(pairs):
        if not checks.is_pair(pair):
            raise ValueError(f"batch_size[{index}]={pair!r} must be a pair (batch size, updates)")
        checks.check_whole(f"batch_size[{index}][0]", pair[0], lowest=1)
        checks.check_whole(f"batch_size[{index}][1]", pair[1], lowest=1)
    # One row per stage of constant batch size; the last stage has no end.
    sizes, lengths = np.asarray(pairs, np.float64).T
    starts = np.cumsum(lengths) - lengths
    lengths[-1] = np.inf

    def schedule_of_updates(count: jax.typing.ArrayLike) -> jax.Array:
        step = _clock(count)
        # The number of completed updates in each stage, (..., stages).
        held = jnp.clip(step[..., None] - starts, 0.0, lengths)
        return schedule(jnp.sum(sizes * held, axis=-1).astype(step.dtype))

    return schedule_of_updates


def _clock(count: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(count).astype(jnp.result_type(float))


def _check_factor(factor: float) -> None:
    if not checks.is_number(factor) or not 0 < factor <= 1:
        raise ValueError(f"factor={factor!r} must be above 0 and at most 1")
