"""Flax layers that mix bfloat16 and float32 intentionally, even under strict dtype promotion.

With `jax_numpy_dtype_promotion=strict`, JAX raises an error if an operation mixes dtypes without a
cast. Flax mixes dtypes inside these two layers, and the networks of this package depend on it.
"""

import flax.linen as nn
import jax


class Dense(nn.Dense):
    """`flax.linen.Dense`, but `dot_general` may return a wider dtype than that of the bias."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(inputs)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` with float32 statistics for bfloat16 activations."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)
