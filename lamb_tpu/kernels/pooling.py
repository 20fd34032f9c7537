"""Max pooling as element-wise maxima, with selects as gradients.

The gradient of JAX's window reduction is a select-and-scatter, which takes XLA's CPU backend
several times as long. If several pixels of a window have the largest value, they share the gradient.
After a ReLU, such pixels are zeros, whose gradient is 0 anyway.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Returns the maximum over 2x2 windows of (batch, height, width, channels).

    Height and width must be even. Differentiable in reverse mode.
    """
    x = jnp.maximum(x[:, 0::2], x[:, 1::2])
    return jnp.maximum(x[:, :, 0::2], x[:, :, 1::2])


def _forward_2x2(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return max_pool_2x2(x), x


def _backward_2x2(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # JAX's derivative pads each of the four pixels to the full image and adds four images. This code
    # needs only one pass over the image.
    batch, height, width, channels = x.shape
    pairs = x.reshape(batch, height // 2, 2, width, channels)
    rows = jnp.maximum(pairs[:, :, 0], pairs[:, :, 1])
    columns = rows.reshape(batch, height // 2, width // 2, 2, channels)
    row_gradient = _pair_gradient(columns, gradient, 3).reshape(rows.shape)
    return (_pair_gradient(pairs, row_gradient, 2).reshape(x.shape),)


max_pool_2x2.defvjp(_forward_2x2, _backward_2x2)


def _pair_gradient(pair: jax.Array, gradient: jax.Array, axis: int) -> jax.Array:
    """Returns the gradient of the maximum over an axis of size 2; equal values get half each."""
    first, second = (lax.index_in_dim(pair, i, axis, keepdims=True) for i in (0, 1))
    share = jnp.where(first == second, 0.5, 1.0).astype(gradient.dtype)
    share *= jnp.expand_dims(gradient, axis)
    return jnp.where(pair == jnp.maximum(first, second), share, jnp.zeros((), share.dtype))


def max_pool_3x3(x: jax.Array) -> jax.Array:
    """Returns the maximum over 3x3 windows with stride 2 of (batch, height, width, channels).

    The windows are centred on the even pixels: padding is 1 on each side. Programs for devices
    other than CPUs use JAX's window reduction.
    """
    return lax.platform_dependent(
        x,
        cpu=lambda x: _along(_along(x, 1), 2),
        default=lambda x: nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))),
    )


def _along(x: jax.Array, axis: int) -> jax.Array:
    """Returns the maximum over windows of 3 along one axis, with edge pixels as padding."""
    size = x.shape[axis]
    even, odd = (lax.slice_in_dim(x, start, size, 2, axis) for start in (0, 1))
    first, last = (lax.slice_in_dim(even, end, end + 1, 1, axis) for end in (0, (size - 1) // 2))
    before = [first, lax.slice_in_dim(odd, 0, (size - 1) // 2, 1, axis)]
    after = [odd] if size % 2 == 0 else [odd, last]
    for neighbours in (before, after):
        even = jnp.maximum(even, jnp.concatenate(neighbours, axis))
    return even
