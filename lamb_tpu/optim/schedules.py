"""Learning-rate schedules: warm-up, hold, decay, and phases one after another.

A schedule is a function of the count of completed updates, as in Optax: the first update of a run
reads it at 0 and the last of `total_steps` updates at `total_steps - 1`. `by_examples` reads one in
examples seen instead.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim.checks import check_above_zero, check_flag, check_range, check_whole, is_number

# Each maps the fraction of the decay that is left, 1..0, to the part of the peak left, 1..0.
DECAYS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "polynomial": lambda left, power: left**power,
    # (1 - cos pi x) / 2, written so that nothing cancels near the end.
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
    r"""Warm-up to a peak, then a decay that reaches `end_value` at `total_steps`.

    With W = `warmup_steps`, H = `hold_steps` and T = `total_steps`, update t has the rate

    .. math::
      \eta(t) = \begin{cases}
        \text{start} + (\text{peak} - \text{start}) \, (t / W)^{\text{warmup power}} & t < W \\
        \text{peak} & W \le t < W + H \\
        \text{end} + (\text{peak} - \text{end}) \, d\!\left(\frac{T - t}{T - S}\right) & t \ge W + H
      \end{cases}

    and `end_value` from T on, where S is where the decay's clock starts and d is :math:`x^p` for
    'polynomial', :math:`(1 - \cos \pi x) / 2` for 'cosine' and 1 for 'constant'. So:

    - With a warm-up the first update has the rate 0 and moves nothing, as in the authors' code;
      `start_value`, or a clock with `first_step=1`, changes that.
    - The last update, t = T - 1, is one short of the end: `end_value` itself is never used.
    - `decay_from='warmup'` starts the clock at S = W + H: the peak is reached, at t = W if W is
      whole.
    - `decay_from='zero'` starts it at S = 0, under the warm-up, as the BERT and LAMB authors' code
      does: the rate jumps down at the end of warm-up and the peak is never reached.

    The defaults are linear warm-up and linear decay: the one-cycle triangle, or without a warm-up
    the line to zero.

    >>> rate = warmup(0.04, total_steps=8, warmup_steps=4)
    >>> print([round(float(rate(t)), 3) for t in range(9)])
    [0.0, 0.01, 0.02, 0.03, 0.04, 0.03, 0.02, 0.01, 0.0]
    >>> rate = warmup(0.04, total_steps=8, warmup_steps=4, decay_from='zero')
    >>> print([round(float(rate(t)), 3) for t in range(9)])
    [0.0, 0.01, 0.02, 0.03, 0.02, 0.015, 0.01, 0.005, 0.0]

    A decay that does not look at T is a function of its own, `exponential_decay` or `step_decay`:

    >>> rate = warmup(0.1, 90, 5, decay=step_decay([30, 60, 80], 0.1), decay_from='zero')
    >>> print([round(float(rate(t)), 6) for t in (0, 4, 5, 29, 30, 60, 80, 89)])
    [0.0, 0.08, 0.1, 0.1, 0.01, 0.001, 0.0001, 0.0001]

    Args:
      peak: the rate at the end of warm-up.
      total_steps: T, in updates; need not be whole.
      warmup_steps: W, in updates; need not be whole, and at most T. At W = T the whole run is
        warm-up: its rate approaches the peak, and `first_step=1` reaches it in the last update.
      decay: 'polynomial', 'cosine', 'constant', or a function from the updates since S to the part
        of the peak that is left, which is followed past T too.
      power: p, of the polynomial only. 1 in the LAMB paper, 2 for LARS.
      end_value: the rate at T, of the polynomial and the cosine; where the decay is a function, the
        rate that it falls towards.
      decay_from: 'warmup' or 'zero', see above.
      start_value: the rate where the warm-up starts, at t = 0. Goyal et al. (arXiv:1706.02677)
        start from the base batch's rate.
      warmup_power: of t / W; 1 is linear.
      hold_steps: H, updates at the peak between warm-up and decay; need not be whole, but must end
        by T.
      min_value: a floor under the whole schedule.
      first_step: what the clock shows at the first update: t is the count of completed updates plus
        this. NVIDIA's BERT and Jasper start at 1, so that no update is lost to a rate of 0.

    Returns:
      A function of the count (an int or an integer array, also traced) to the rate, float32
      (float64 where JAX has it enabled).

    Raises:
      ValueError: for an argument that is out of range or has no meaning for the decay chosen.
    """
    if not callable(decay) and not (isinstance(decay, str) and decay in DECAYS):
        raise ValueError(
            f"decay {decay!r} is unknown; known: {', '.join(DECAYS)}, or a function such as "
            "exponential_decay(...)"
        )
    if not isinstance(decay_from, str) or decay_from not in ("warmup", "zero"):
        raise ValueError(f"decay_from must be 'warmup' or 'zero', not {decay_from!r}")
    check_above_zero(total_steps=total_steps, power=power, warmup_power=warmup_power)
    for name, value in {
        "peak": peak,
        "warmup_steps": warmup_steps,
        "end_value": end_value,
        "start_value": start_value,
        "hold_steps": hold_steps,
        "min_value": min_value,
        "first_step": first_step,
    }.items():
        check_range(name, value)
    shown = "that is a function" if callable(decay) else repr(decay)
    if decay != "polynomial" and power != 1.0:
        raise ValueError(f"power {power!r} has no meaning for decay {shown}; leave it out")
    if decay == "constant" and end_value != 0.0:
        raise ValueError(f"end_value {end_value!r} has no meaning for decay {shown}; leave it out")
    peak_ends = warmup_steps + hold_steps
    if warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps {warmup_steps!r} is longer than total_steps {total_steps!r}, so the "
            f"rate would never reach its peak; give at most {total_steps!r} warmup_steps"
        )
    if hold_steps and peak_ends > total_steps:
        raise ValueError(
            f"hold_steps {hold_steps!r} after warmup_steps {warmup_steps!r} must end by "
            f"total_steps {total_steps!r}"
        )
    # S and T - S of the formula.
    start = peak_ends if decay_from == "warmup" else 0.0
    length = total_steps - start

    def part_left(step: jax.Array) -> jax.Array:
        if callable(decay):
            return decay(jnp.maximum(step - start, 0.0))
        # (T - t) / (T - S) and not 1 - (t - S) / (T - S), which cancels near the end.
        # A warm-up as long as the run leaves no decay: nothing is left of it, at any step.
        left = jnp.clip((total_steps - step) / length, 0.0, 1.0) if length > 0 else 0.0 * step
        return DECAYS[decay](left, power)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = _clock(count) + first_step
        rate = end_value + (peak - end_value) * part_left(step)
        # Each part covers the one before: hold the decay, warm-up both.
        if hold_steps:
            rate = jnp.where(step < peak_ends, peak, rate)
        if warmup_steps:
            rising = (step / warmup_steps) ** warmup_power
            rate = jnp.where(step < warmup_steps, start_value + (peak - start_value) * rising, rate)
        return jnp.maximum(rate, min_value) if min_value else rate

    return schedule


def exponential_decay(factor: float, every_steps: float, staircase: bool = True) -> optax.Schedule:
    """The part `factor` ** (t / `every_steps`) of the peak, for `warmup(decay=...)`.

    >>> part = exponential_decay(0.5, every_steps=10)
    >>> print([float(part(t)) for t in (0, 9, 10, 20)])
    [1.0, 1.0, 0.5, 0.25]

    Args:
      factor: above 0 and at most 1. EfficientNet has 0.97.
      every_steps: in updates; need not be whole. EfficientNet has 2.4 epochs.
      staircase: drop by the whole factor every `every_steps`, rather than smoothly.

    Returns:
      A function of the updates since the decay began to the part of the peak.

    Raises:
      ValueError: a factor or a length out of range.

    References:
      Tan and Le's training code, tensorflow/tpu, models/official/efficientnet/utils.py.
    """
    _check_factor(factor)
    check_above_zero(every_steps=every_steps)
    check_flag("staircase", staircase)

    def part(count: jax.typing.ArrayLike) -> jax.Array:
        periods = _clock(count) / every_steps
        if staircase:
            # In float32 12513 / 1251.3 falls short of 10, and the drop would come an update late.
            periods = jnp.floor(periods * (1.0 + 4.0 * jnp.finfo(periods.dtype).eps))
        return jnp.power(factor, periods)

    return part


def step_decay(boundaries: Sequence[float], factor: float) -> optax.Schedule:
    """The part `factor` ** (number of boundaries reached) of the peak, for `warmup(decay=...)`.

    Goyal et al. (arXiv:1706.02677) have a tenth at epochs 30, 60 and 80 of 90, counted from the
    start of the run: give `warmup` also `decay_from='zero'`.

    >>> part = step_decay([30, 60, 80], 0.1)
    >>> print([round(float(part(t)), 6) for t in (29, 30, 60, 80)])
    [1.0, 0.1, 0.01, 0.001]

    Args:
      boundaries: in updates, rising; need not be whole. An update at a boundary has dropped.
      factor: above 0 and at most 1.

    Returns:
      A function of the updates since the decay began to the part of the peak.

    Raises:
      ValueError: no boundaries, boundaries that do not rise, or a factor out of range.
    """
    _check_factor(factor)
    try:
        # Anything that is no row of numbers ends in the error below.
        edges = np.asarray(boundaries, np.float64)
    except (TypeError, ValueError):
        edges = np.empty(0)
    finite = edges.ndim == 1 and edges.size > 0 and np.isfinite(edges).all()
    if not finite or not np.all(np.diff(edges, prepend=0.0) > 0):
        raise ValueError(f"boundaries must be above 0 and rise, not {boundaries!r}")

    def part(count: jax.typing.ArrayLike) -> jax.Array:
        step = _clock(count)
        # Counts of any shape have an axis of boundaries added, (..., boundaries).
        reached = jnp.sum(step[..., None] >= edges.astype(step.dtype), axis=-1)
        return jnp.power(factor, reached.astype(step.dtype))

    return part


def phases(*parts: tuple[optax.Schedule, int]) -> optax.Schedule:
    """Schedules one after another, each counting from 0 again: re-warm-up between phases.

    The two phases of NVIDIA's BERT in the LAMB paper's mixed-batch recipe, 64K examples of 128
    tokens and then 32K of 512:

    >>> first = warmup(6e-3, 7038, 0.2843 * 7038, power=0.5, decay_from='zero', first_step=1)
    >>> second = warmup(4e-3, 1563, 0.128 * 1563, power=0.5, decay_from='zero', first_step=1)
    >>> rate = phases((first, 7038), (second, 1563))
    >>> print([round(float(rate(t)), 6) for t in (0, 2000, 7037, 7038, 7238, 8599)])
    [3e-06, 0.005076, 0.0, 2e-05, 0.003734, 0.000101]

    Args:
      *parts: pairs of a schedule and the updates for which it holds, a whole number of at least 1.

    Returns:
      The schedule of the whole run; past its end the last phase goes on.

    Raises:
      ValueError: no phases, or a length that is not a whole number of at least 1.
    """
    if not parts:
        raise ValueError("phases needs at least one (schedule, steps)")
    for index, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise ValueError(f"parts must be pairs (schedule, steps), and not {part!r}")
        schedule, steps = part
        if not callable(schedule):
            raise ValueError(f"the schedule of phase {index} is not a function: {schedule!r}")
        if not is_number(steps) or not 1 <= steps < math.inf or int(steps) != steps:
            raise ValueError(
                f"the steps of phase {index} must be a whole number of at least 1, not {steps!r}"
            )
    ends = np.cumsum([int(steps) for _, steps in parts[:-1]], dtype=int).tolist()
    return optax.join_schedules([schedule for schedule, _ in parts], ends)


def by_examples(
    schedule: optax.Schedule, batch_size: int | Sequence[tuple[int, int]]
) -> optax.Schedule:
    """A schedule of the examples seen, read by the count of completed updates.

    Where the batch grows during a run, epochs no longer are a number of updates. Give then every
    length of the schedule in examples. Here the batch is 128 for 10 updates and then 256:

    >>> rate = warmup(0.1, total_steps=6_400, warmup_steps=1_280)
    >>> grown = by_examples(rate, [(128, 10), (256, 20)])
    >>> print([round(float(grown(t)), 4) for t in (0, 5, 10, 20, 30)])
    [0.0, 0.05, 0.1, 0.05, 0.0]

    Args:
      schedule: a function of the examples before an update to the rate.
      batch_size: examples in an update; or pairs (batch size, updates for which it holds) in their
        order, of which the last goes on.

    Returns:
      A function of the count of completed updates to the rate. A count of examples is rounded as
      float32 is (float64 where JAX has it enabled).

    Raises:
      ValueError: the schedule is no function, or a size or a length is not a whole number of at
        least 1.
    """
    if not callable(schedule):
        raise ValueError(f"schedule must be a function of the examples seen, not {schedule!r}")
    pairs: Any = batch_size
    if is_number(batch_size):
        check_whole("batch_size", batch_size, lowest=1)
        pairs = [(batch_size, 1)]
    elif not isinstance(batch_size, (tuple, list)) or not batch_size:
        raise ValueError(
            f"batch_size must be a number, or pairs (batch size, updates), not {batch_size!r}"
        )
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"batch_size has pairs (batch size, updates), and not {pair!r}")
        check_whole("each number in the pairs of batch_size", pair[0], lowest=1)
        check_whole("each number in the pairs of batch_size", pair[1], lowest=1)
    # One row for each stage of constant batch size; the last stage has no end.
    sizes, lengths = np.asarray(pairs, np.float64).T
    starts = np.cumsum(lengths) - lengths
    lengths[-1] = np.inf

    def schedule_of_updates(count: jax.typing.ArrayLike) -> jax.Array:
        step = _clock(count)
        # The updates of each stage so far, (..., stages).
        held = jnp.clip(step[..., None] - starts, 0.0, lengths)
        return schedule(jnp.sum(sizes * held, axis=-1).astype(step.dtype))

    return schedule_of_updates


def _clock(count: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(count).astype(jnp.result_type(float))


def _check_factor(factor: float) -> None:
    if not is_number(factor) or not 0 < factor <= 1:
        raise ValueError(f"factor must be above 0 and at most 1, not {factor!r}")
