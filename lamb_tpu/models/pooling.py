"""Max pooling as element-wise maxima, whose gradients are selects.

The gradient of JAX's own window reduction is a select-and-scatter, for which XLA's CPU backend
takes several times as long. Where pixels of a window are equal, the gradient is shared between
them; after a ReLU those are the zeros, through which none passes on.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Maximum over 2x2 windows of (batch, height, width, channels), height and width even."""
    x = jnp.maximum(x[:, 0::2], x[:, 1::2])
    return jnp.maximum(x[:, :, 0::2], x[:, :, 1::2])


def max_pool_3x3(x: jax.Array) -> jax.Array:
    """Maximum over 3x3 windows at every other pixel of (batch, height, width, channels).

    The windows are centred on the even pixels: padding is 1 on each side. Programs for devices
    other than CPUs have the window reduction.
    """
    return lax.platform_dependent(
        x,
        cpu=lambda x: _along(_along(x, 1), 2),
        default=lambda x: nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))),
    )


def _along(x: jax.Array, axis: int) -> jax.Array:
    """Maximum over windows of 3 along one axis. At the ends a pixel stands in for the padding."""
    size = x.shape[axis]
    even, odd = (lax.slice_in_dim(x, start, size, 2, axis) for start in (0, 1))
    first, last = (lax.slice_in_dim(even, end, end + 1, 1, axis) for end in (0, (size - 1) // 2))
    before = [first, lax.slice_in_dim(odd, 0, (size - 1) // 2, 1, axis)]
    behind = [odd] if size % 2 == 0 else [odd, last]
    for neighbours in (before, behind):
        even = jnp.maximum(even, jnp.concatenate(neighbours, axis))
    return even
