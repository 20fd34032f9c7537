"""Norms of vectors that are correct even if squares of the values overflow or underflow.

In float32, squares of values above 1.8e19 overflow, and squares of values far below 1e-19 are 0. The
values are first divided by a power of two, which is exact: if all squares are in range, the result
has the same bits as without the division.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def l2(vectors: Sequence[jax.Array]) -> jax.Array:
    """Returns the l2 norm of the concatenation of real vectors, a scalar of their dtype.

    >>> print(l2([jnp.array([3e30]), jnp.array([4e30])]))
    5e+30
    """
    scale = power_of_two(jnp.max(jnp.stack([jnp.max(jnp.abs(v), initial=0.0) for v in vectors])))
    return scale * jnp.sqrt(sum(jnp.sum((v / scale) ** 2) for v in vectors))


def root_mean_square(values: jax.Array) -> jax.Array:
    """Returns the root mean square of a real array; 0 for an array without elements.

    >>> print(root_mean_square(jnp.array([3e-30, -3e-30])))
    3e-30
    """
    scale = power_of_two(jnp.max(jnp.abs(values), initial=0.0))
    scaled = values / scale
    return scale * jnp.sqrt(jnp.sum(scaled * scaled) / max(values.size, 1))


def power_of_two(largest: jax.Array) -> jax.Array:
    """Returns the largest power of two that does not exceed a value; 1 for 0, infinity and NaN.

    >>> print(power_of_two(jnp.float32(5.0)), power_of_two(jnp.float32(0.0)))
    4.0 1.0
    """
    _, exponent = jnp.frexp(largest)
    found = jnp.ldexp(jnp.ones_like(largest), exponent - 1)
    return jnp.where((found > 0) & jnp.isfinite(largest) & (largest > 0), found, 1.0)
