"""Selected values of vectors, sent as values and indices with a fixed budget."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.collectives import split
from lamb_tpu.parallel.exchange import selection

# Largest number of values of all vectors that are sent together, because indices are int32.
LARGEST = 2**31 - 1


class Selected(NamedTuple):
    """Selected values of a vector, before packing."""

    values: jax.Array  # (n,), all values
    mask: jax.Array  # (n,), boolean; True where the value is sent

    def dense(self) -> jax.Array:
        """Returns the vector with 0 for values that are not selected."""
        return jnp.where(self.mask, self.values, 0)


def total(
    vectors: Sequence[Selected], budgets: Sequence[int], axes: Sequence[str]
) -> list[jax.Array]:
    """Sums vectors of selected values over devices, in one operation.

    A vector's budget is the largest number of values that its mask selects. To every other device, a
    device sends values and indices for the full budgets. If the sum of the budgets is at least the
    number of all values divided by the number of devices, an all-reduce of the full vectors, with 0
    for values that are not selected, sends less and is used instead.
    """
    sizes = [vector.mask.size for vector in vectors]
    num_devices = math.prod(lax.axis_size(name) for name in axes)
    if sum(budgets) * num_devices >= sum(sizes):
        return list(lax.psum([vector.dense() for vector in vectors], tuple(axes)))
    values, indices = gather(vectors, budgets, axes)
    joined = jnp.zeros(sum(sizes), values.dtype)
    # Unused positions have an index after the last one and are dropped.
    joined = joined.at[indices.ravel()].add(values.ravel(), mode="drop")
    return split(joined, sizes)


def each(
    vectors: Sequence[Selected], budgets: Sequence[int], axes: Sequence[str]
) -> list[jax.Array]:
    """Returns the vectors of all devices, (devices, n) for each vector; unselected values are 0."""
    sizes = [vector.mask.size for vector in vectors]
    values, indices = gather(vectors, budgets, axes)
    rows = jnp.zeros((len(values), sum(sizes)), values.dtype)
    rows = rows.at[jnp.arange(len(values))[:, None], indices].set(values, mode="drop")
    return split(rows, sizes)


def gather(
    vectors: Sequence[Selected], budgets: Sequence[int], axes: Sequence[str]
) -> tuple[jax.Array, jax.Array]:
    """Gathers the selected values of every device, and their indices in the concatenated vectors.

    Returns:
      values: (devices, sum of the budgets).
      indices: int32, in the same shape; at unused positions, the length of the concatenated vectors.
    """
    mask = jnp.concatenate([vector.mask for vector in vectors])
    joined = jnp.concatenate([vector.values for vector in vectors])
    indices = selection.places(mask, jnp.arange(sum(budgets), dtype=jnp.int32))
    own = joined.at[indices].get(mode="fill", fill_value=0)
    # Send values and indices in one operation, as words of 32 bits.
    words = lax.bitcast_convert_type(own, jnp.uint32)
    sent = jnp.concatenate([words.ravel(), lax.bitcast_convert_type(indices, jnp.uint32)])
    received = collectives.gather_rows(sent, axes)
    parts = received[:, : words.size].reshape(-1, *words.shape)
    return (
        lax.bitcast_convert_type(parts, own.dtype),
        lax.bitcast_convert_type(received[:, words.size :], jnp.int32),
    )


def check_length(num_values: int) -> None:
    """Raises ValueError if there are too many values for int32 indices."""
    if num_values > LARGEST:
        raise ValueError(
            f"num_values={num_values} is too large for indices of 32 bits; add parameters to full_precision "
            f"until at most {LARGEST} values remain"
        )
