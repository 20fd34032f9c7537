"""Selection of the values that Deep Gradient Compression sends, by an adapted threshold.

A threshold that is estimated from samples selects more or fewer values than the budget, the number
of values to send. So the threshold is adapted, by the same factors as in the authors'
synxlin/deep-gradient-compression.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.parallel.exchange import selection

# A threshold is adapted, at most ten times, until it selects 0.8 to 1.3 times the budget.
_LOWER, _UPPER, _ADAPTATIONS = 0.8, 1.3, 10
_State = tuple[jax.Array, jax.Array, jax.Array]


class Cut(NamedTuple):
    """Selection of the values of one matrix."""

    threshold: jax.Array  # values with smaller magnitudes are not sent
    last: jax.Array  # index, int32: values up to here are sent unless they are below the threshold
    all_above: jax.Array  # whether values after `last` are sent if they are above the threshold

    def mask(self, magnitudes: jax.Array) -> jax.Array:
        """Returns the mask of the magnitudes that are sent."""
        places = jnp.arange(magnitudes.size, dtype=jnp.int32)
        first = (magnitudes >= self.threshold) & (places <= self.last)
        return first | (self.all_above & (magnitudes > self.threshold))


def first(magnitudes: jax.Array, threshold: jax.Array, budget: int) -> Cut:
    """Returns the selection of the first `budget` values that are not below a threshold."""
    last = selection.last_of_first(magnitudes >= threshold, budget)
    return Cut(threshold, last, jnp.bool_(False))


def _bounds(budget: int) -> tuple[int, int]:
    """Returns the smallest and the largest number of selected values at which adaptation stops."""
    return math.ceil(_LOWER * budget), math.floor(_UPPER * budget)


def lowered(
    magnitudes: jax.Array, threshold: jax.Array, budget: int
) -> tuple[jax.Array, jax.Array]:
    """Lowers a threshold until it selects enough values; also returns whether it selects too many.

    Each lower threshold is 0.8 times the previous one, so all ten are known in advance, and one pass
    over the values counts how many each selects. If even the tenth selects too few, it is returned.
    """
    too_few, too_many = _bounds(budget)
    thresholds = [threshold]
    for _ in range(_ADAPTATIONS):
        lower = thresholds[-1] * jnp.asarray(_LOWER, threshold.dtype)
        thresholds.append(lax.optimization_barrier(lower))  # rounded each time, as in a loop
    found = jnp.sum(magnitudes >= threshold, dtype=jnp.int32)
    counts = lax.cond(
        found < too_few,
        lambda: jnp.stack(
            [found, *selection.numbers([magnitudes >= each for each in thresholds[1:]])]
        ),
        lambda: jnp.full(len(thresholds), found),
    )
    step = jnp.argmax(
        (counts >= too_few).at[-1].set(True)
    )  # the first threshold that is low enough
    exact = (counts[step] > too_many) & (step < _ADAPTATIONS)
    return jnp.stack(thresholds)[step], exact


def adapted(magnitudes: jax.Array, threshold: jax.Array, budget: int) -> jax.Array:
    """Lowers or raises a threshold, at most ten times, until it selects 0.8 to 1.3 times the budget."""
    too_few, too_many = _bounds(budget)

    def number(threshold: jax.Array) -> jax.Array:
        return jnp.sum(magnitudes >= threshold, dtype=jnp.int32)

    def adapts(state: _State) -> jax.Array:
        _, found, step = state
        return ((found < too_few) | (found > too_many)) & (step < _ADAPTATIONS)

    def adapt(state: _State) -> _State:
        threshold, found, step = state
        threshold *= jnp.where(found > too_many, _UPPER, _LOWER).astype(threshold.dtype)
        return threshold, number(threshold), step + 1

    start = threshold, number(threshold), jnp.zeros((), jnp.int32)
    return lax.while_loop(adapts, adapt, start)[0]
