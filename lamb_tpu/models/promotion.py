"""Flax layers that mix bfloat16 and float32 on purpose, also where JAX forbids it by default.

With `jax_numpy_dtype_promotion=strict`, JAX raises an error where an operation mixes dtypes without
a cast. Flax mixes them within these two layers, whose results the networks here rely on.
"""

import flax.linen as nn
import jax


class Dense(nn.Dense):
    """`flax.linen.Dense` whose product may be wider than its bias, see its `dot_general`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(inputs)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm`, whose statistics are float32 for activations of bfloat16."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)
