"""Learning rates for a batch that changes: the factor of each rule, and a rate from outside.

An optimizer counts updates and knows no examples. Where the batch changes, the schedule's place is
a number of examples, so the host reads the schedule and gives the step the rate of its update.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu.optim.checks import check_above_zero, check_range
from lamb_tpu.optim.scaling import scale_learning_rate


def rate_factor(
    rule: str, base_batch_size: int, batch_size: int, adjust_factor: float = 1.0
) -> float:
    """Returns what the schedule's rate is multiplied by at a batch size.

    >>> rate_factor('sqrt', 256, 1024), rate_factor('sqrt', 256, 1024, adjust_factor=0.5)
    (2.0, 1.5)

    Args:
      rule: 'identity' for a rate that does not follow, 'linear' or 'sqrt', see
        `optim.scale_learning_rate`.
      base_batch_size: the batch size, in examples, for which the schedule was tuned.
      batch_size: the present one.
      adjust_factor: the part of the change that is made, SimiGrad's `lr_adjust_factor`: the factor
        f becomes 1 + adjust_factor (f - 1). SimiGrad has 'sqrt' and 1 unless it is set.

    Raises:
      ValueError: an unknown rule, a batch size not above 0, a negative adjust_factor.
    """
    check_above_zero(base_batch_size=base_batch_size, batch_size=batch_size)
    check_range("adjust_factor", adjust_factor)
    return (scale_learning_rate(rule, 1.0, base_batch_size, batch_size) - 1) * adjust_factor + 1


# A context variable, because Optax calls a schedule with the count of updates alone.
_rate: contextvars.ContextVar[Any] = contextvars.ContextVar("rate", default=math.nan)


@contextlib.contextmanager
def given_rate(rate: jax.typing.ArrayLike) -> Iterator[None]:
    """Sets the rate that `rate_given` returns, while an update is traced inside the block.

    >>> with given_rate(0.5):
    ...     float(rate_given(7))
    0.5

    Args:
      rate: a number, or a scalar that may be a tracer.
    """
    token = _rate.set(rate)
    try:
        yield
    finally:
        _rate.reset(token)


def rate_given(count: jax.typing.ArrayLike) -> jax.Array:
    """Schedule of the rate that `given_rate` has set, whatever the count; NaN where none is set."""
    del count
    return jnp.asarray(_rate.get(), jnp.float32)
