"""Selected values of vectors, sent as values and indices with a fixed budget."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import selection
from lamb_tpu.parallel.exchange.joined import split

# Indices are int32, over all vectors that are sent together.
LARGEST = 2**31 - 1


class Selected(NamedTuple):
    """Some values of a vector, in a form that is not packed yet.

    Attributes:
      values: (n,), of which the others are not sent.
      mask: (n,), boolean; where the value is sent.
    """

    values: jax.Array
    mask: jax.Array

    def dense(self) -> jax.Array:
        """The vector with 0 for the other values."""
        return jnp.where(self.mask, self.values, 0)


def total(
    vectors: Sequence[Selected], budgets: Sequence[int], axes: Sequence[str], num_devices: int
) -> list[jax.Array]:
    """Sums vectors of selected values over devices, in one operation.

    A device sends as many values and indices as the budgets allow to every other device. Where
    that is more than an all-reduce of the whole vectors sends, which is so with a budget of 1 in
    `num_devices` values, the vectors are all-reduced with 0 for the other values.

    Args:
      vectors: this device's.
      budgets: of each vector, the largest number of values that its mask selects.
      axes: mesh axes to sum over.
      num_devices: number of devices along these axes.

    Returns:
      The sums, (n,) of each.
    """
    sizes = [vector.mask.size for vector in vectors]
    if sum(budgets) * num_devices >= sum(sizes):
        return list(lax.psum([vector.dense() for vector in vectors], tuple(axes)))
    values, indices = gather(vectors, budgets, axes)
    joined = jnp.zeros(sum(sizes), values.dtype)
    # Places that are not used have the index after the last, and are dropped.
    joined = joined.at[indices.ravel()].add(values.ravel(), mode="drop")
    return split(joined, sizes)


def each(
    vectors: Sequence[Selected], budgets: Sequence[int], axes: Sequence[str]
) -> list[jax.Array]:
    """Returns every device's vectors with 0 for the other values, (devices, n) of each."""
    sizes = [vector.mask.size for vector in vectors]
    values, indices = gather(vectors, budgets, axes)
    rows = jnp.zeros((len(values), sum(sizes)), values.dtype)
    rows = rows.at[jnp.arange(len(values))[:, None], indices].set(values, mode="drop")
    return split(rows, sizes)


def gather(
    vectors: Sequence[Selected], budgets: Sequence[int], axes: Sequence[str]
) -> tuple[jax.Array, jax.Array]:
    """Gathers the selected values of every device, and their indices in the joined vectors.

    Returns:
      values: (devices, sum of the budgets).
      indices: the same shape, int32; the joined length for places that are not used.
    """
    mask = jnp.concatenate([vector.mask for vector in vectors])
    joined = jnp.concatenate([vector.values for vector in vectors])
    indices = selection.places(mask, jnp.arange(sum(budgets), dtype=jnp.int32))
    own = joined.at[indices].get(mode="fill", fill_value=0)
    # Both in one operation, as words of 32 bits.
    words = lax.bitcast_convert_type(own, jnp.uint32)
    sent = jnp.concatenate([words.ravel(), lax.bitcast_convert_type(indices, jnp.uint32)])
    received = collectives.gather_rows(sent, axes)
    parts = received[:, : words.size].reshape(-1, *words.shape)
    return (
        lax.bitcast_convert_type(parts, own.dtype),
        lax.bitcast_convert_type(received[:, words.size :], jnp.int32),
    )


def check_length(num_values: int) -> None:
    """Raises ValueError where indices of vectors that are sent together do not fit."""
    if num_values > LARGEST:
        raise ValueError(
            f"{num_values} values are too many for indices of 32 bits; at most {LARGEST}"
        )
