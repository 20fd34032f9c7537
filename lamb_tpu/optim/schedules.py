"""Learning rates: how they scale with the batch, how they warm up and how they decay.

A schedule is a function of the count of completed updates, as in Optax: the first update of a run
reads it at 0 and the last of `total_steps` updates at `total_steps - 1`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

SCALING_RULES: dict[str, Callable[[float], float]] = {
    "identity": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}

# Each maps the fraction of the decay that lies behind, 0..1, to the part of the peak left, 1..0.
DECAYS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "polynomial": lambda left, power: left**power,
    "cosine": lambda left, power: 0.5 * (1.0 - jnp.cos(jnp.pi * left)),
    "constant": lambda left, power: jnp.ones_like(left),
}


class ScaledWarmup(NamedTuple):
    """What LEGW gives for a batch size."""

    learning_rate: float  # the peak
    warmup_epochs: float


def scale_learning_rate(
    rule: str, base_learning_rate: float, base_batch_size: int, batch_size: int
) -> float:
    """The learning rate for `batch_size`, from the one that was tuned at `base_batch_size`.

    >>> scale_learning_rate('linear', 0.1, 256, 8192)
    3.2
    >>> round(scale_learning_rate('sqrt', 5e-3, 32768, 512), 6)  # BERT in the LAMB paper
    0.000625

    Args:
      rule: 'identity', 'linear' (Goyal et al., arXiv:1706.02677) or 'sqrt' (the LAMB and LEGW
        papers).
      base_learning_rate: the tuned rate.
      base_batch_size: the batch size, in examples, at which it was tuned.
      batch_size: the batch size of the run, in examples.

    Raises:
      ValueError: an unknown rule, or a batch size that is not positive.
    """
    if rule not in SCALING_RULES:
        raise ValueError(f"rule {rule!r} is unknown; known: {', '.join(SCALING_RULES)}")
    return base_learning_rate * SCALING_RULES[rule](_batch_ratio(base_batch_size, batch_size))


def legw(
    base_learning_rate: float, base_warmup_epochs: float, base_batch_size: int, batch_size: int
) -> ScaledWarmup:
    """LEGW: for k times the batch, sqrt(k) times the rate and k times the warm-up epochs.

    The number of warm-up updates stays what it was.

    >>> legw(4 / (2**3 * 100), 0.3125, 512, 32768)  # ResNet-50 in the LAMB paper
    ScaledWarmup(learning_rate=0.04, warmup_epochs=20.0)

    Args:
      base_learning_rate: the peak rate that was tuned at `base_batch_size`.
      base_warmup_epochs: the warm-up there, in epochs; fractions are meant.
      base_batch_size: in examples.
      batch_size: in examples.

    Raises:
      ValueError: a batch size that is not positive, or a negative warm-up.

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv:1901.08256.
    """
    if base_warmup_epochs < 0:
        raise ValueError(f"base_warmup_epochs must be at least 0, not {base_warmup_epochs!r}")
    return ScaledWarmup(
        scale_learning_rate("sqrt", base_learning_rate, base_batch_size, batch_size),
        base_warmup_epochs * _batch_ratio(base_batch_size, batch_size),
    )


def warmup(
    peak: float,
    total_steps: float,
    warmup_steps: float = 0.0,
    decay: str = "polynomial",
    power: float = 1.0,
    end_value: float = 0.0,
    decay_from: str = "warmup",
) -> optax.Schedule:
    r"""Linear warm-up from 0, then a decay that reaches `end_value` at `total_steps`.

    With W = `warmup_steps` and T = `total_steps`, update t (counted from 0) has the rate

    .. math::
      \eta(t) = \begin{cases}
        \text{peak} \cdot t / W & t < W \\
        \text{end} + (\text{peak} - \text{end}) \, d\!\left(\frac{T - t}{T - S}\right) & t \ge W
      \end{cases}

    and `end_value` from T on, where S is where the decay's clock starts and d is :math:`x^p` for
    'polynomial', :math:`(1 - \cos \pi x) / 2` for 'cosine' and 1 for 'constant'. So:

    - With a warm-up the first update has the rate 0 and moves nothing, as in the authors' code.
    - The last update, t = T - 1, is one short of the end: `end_value` itself is never used.
    - `decay_from='warmup'` starts the clock at S = W: the peak is reached, at t = W if W is whole.
    - `decay_from='zero'` starts it at S = 0, under the warm-up, as the BERT and LAMB authors' code
      does: the rate jumps down at the end of warm-up and the peak is never reached.

    >>> rate = warmup(0.04, total_steps=8, warmup_steps=4)
    >>> print([round(float(rate(t)), 3) for t in range(9)])
    [0.0, 0.01, 0.02, 0.03, 0.04, 0.03, 0.02, 0.01, 0.0]
    >>> rate = warmup(0.04, total_steps=8, warmup_steps=4, decay_from='zero')
    >>> print([round(float(rate(t)), 3) for t in range(9)])
    [0.0, 0.01, 0.02, 0.03, 0.02, 0.015, 0.01, 0.005, 0.0]

    Args:
      peak: the rate at the end of warm-up.
      total_steps: T, in updates; need not be whole.
      warmup_steps: W, in updates; need not be whole, and may exceed T, where the run ends in its
        warm-up.
      decay: 'polynomial', 'cosine' or 'constant'.
      power: p, of the polynomial only. 1 in the LAMB paper, 2 for LARS.
      end_value: the rate at T.
      decay_from: 'warmup' or 'zero', see above.

    Returns:
      A function of the count (an int or an integer array, also traced) to the rate, float32
      (float64 where JAX has it enabled).

    Raises:
      ValueError: for an argument that is out of range or has no meaning for the decay chosen.
    """
    if decay not in DECAYS:
        raise ValueError(f"decay {decay!r} is unknown; known: {', '.join(DECAYS)}")
    if decay_from not in ("warmup", "zero"):
        raise ValueError(f"decay_from must be 'warmup' or 'zero', not {decay_from!r}")
    if not total_steps > 0:
        raise ValueError(f"total_steps must be above 0, not {total_steps!r}")
    for name, value in (("peak", peak), ("warmup_steps", warmup_steps), ("end_value", end_value)):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, not {value!r}")
    if not power > 0:
        raise ValueError(f"power must be above 0, not {power!r}")
    if decay != "polynomial" and power != 1.0:
        raise ValueError(f"power {power!r} has no meaning for decay {decay!r}; leave it out")
    if decay == "constant" and end_value != 0.0:
        raise ValueError(f"end_value {end_value!r} has no meaning for decay 'constant'")
    start = warmup_steps if decay_from == "warmup" else 0.0
    length = total_steps - start

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count).astype(jnp.result_type(float))
        # (T - t) / (T - S) and not 1 - (t - S) / (T - S), which cancels near the end.
        left = jnp.clip((total_steps - step) / length, 0.0, 1.0) if length > 0 else 0.0 * step
        decayed = end_value + (peak - end_value) * DECAYS[decay](left, power)
        if not warmup_steps:
            return decayed
        return jnp.where(step < warmup_steps, peak * (step / warmup_steps), decayed)

    return schedule


def _batch_ratio(base_batch_size: int, batch_size: int) -> float:
    for name, value in (("base_batch_size", base_batch_size), ("batch_size", batch_size)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    return batch_size / base_batch_size
