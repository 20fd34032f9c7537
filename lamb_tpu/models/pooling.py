"""Max pooling as element-wise maxima, whose gradients are selects.

The gradient of JAX's own window reduction is a select-and-scatter, for which XLA's CPU backend
takes several times as long. Where pixels of a window are equal, the gradient is shared between
them; after a ReLU those are the zeros, through which none passes on.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Maximum over 2x2 windows of (batch, height, width, channels), height and width even.

    Differentiable in reverse mode.
    """
    x = jnp.maximum(x[:, 0::2], x[:, 1::2])
    return jnp.maximum(x[:, :, 0::2], x[:, :, 1::2])


def _forward_2x2(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return max_pool_2x2(x), x


def _backward_2x2(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # JAX' own derivative pads each of the four pixels to the whole image and adds the images up;
    # this is one pass over it.
    batch, height, width, channels = x.shape
    pairs = x.reshape(batch, height // 2, 2, width, channels)
    rows = jnp.maximum(pairs[:, :, 0], pairs[:, :, 1])
    columns = rows.reshape(batch, height // 2, width // 2, 2, channels)
    of_rows = _of_pair(columns, gradient, 3).reshape(rows.shape)
    return (_of_pair(pairs, of_rows, 2).reshape(x.shape),)


max_pool_2x2.defvjp(_forward_2x2, _backward_2x2)


def _of_pair(pair: jax.Array, gradient: jax.Array, axis: int) -> jax.Array:
    """Returns the gradient of the maximum over an axis of two; equal ones get half of it each."""
    first, second = (lax.index_in_dim(pair, at, axis, keepdims=True) for at in (0, 1))
    share = jnp.where(first == second, 0.5, 1.0).astype(gradient.dtype)
    share *= jnp.expand_dims(gradient, axis)
    return jnp.where(pair == jnp.maximum(first, second), share, jnp.zeros((), share.dtype))


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
