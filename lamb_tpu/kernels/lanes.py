"""Packing of examples along the channel axis, so that few channels fill the lanes of a TPU.

A TPU computes on tiles of 8 x 128 values: for images, 8 examples by 128 channels of one pixel.
Unused lanes are computed and moved too: 96 of 128 lanes with 32 channels, 112 of 256 with 144
channels. Packing puts examples n, n + 1, ... of a device's batch into one row, with their
channels side by side: (32, h, w, 144) becomes (8, h, w, 4 x 144), which uses 576 of 640 lanes.
Operations on separate channels, such as a depthwise convolution, need no change.

The kernel of a convolution over channels gets zeros between different examples, so the convolution has
`packed` times as many products. But few channels leave the matrix units idle anyway. So packing only pays on
TPUs and for few channels. `BatchNorm` of `lamb_tpu.models.norm` supports packed examples.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.kernels.convolution import convolve

# Rows of a tile, and the most examples per row: four times the stem's 32 channels fill 128 lanes.
_SUBLANES, _MOST = 8, 4


def examples_a_row(rows: int) -> int:
    """Returns the number of examples to pack on a device with `rows` examples: 4, 2 or 1.

    The number is 1 if packing does not pay: on devices other than TPUs, and if packed examples do not
    fill complete tiles of 8. The number is also 1 outside shard_map, where `rows` counts the rows of all
    devices, so a packed row could span two devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The target device of the program, which may differ from the device that compiles it.
    device = mesh.abstract_device
    if not mesh.manual_axes or device is None or device.platform != "tpu":
        return 1
    return 1 if rows % _SUBLANES else math.gcd(rows // _SUBLANES, _MOST)


def pack(x: jax.Array, packed: int) -> jax.Array:
    """Packs (batch, ..., channels) to (batch / packed, ..., packed x channels).

    >>> print(pack(jnp.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]), 2))
    [[[1 2 5 6]
      [3 4 7 8]]]
    """
    rows, *positions, channels = x.shape
    x = x.reshape(rows // packed, packed, *positions, channels)
    return jnp.moveaxis(x, 1, -2).reshape(rows // packed, *positions, packed * channels)


def unpack(x: jax.Array, packed: int) -> jax.Array:
    """Reverses `pack`."""
    rows, *positions, channels = x.shape
    x = x.reshape(rows, *positions, packed, channels // packed)
    return jnp.moveaxis(x, -2, 1).reshape(rows * packed, *positions, channels // packed)


class Conv(nn.Module):
    """A convolution of packed examples: square kernel, no bias, and TensorFlow's SAME padding.

    Its parameter is the same as in `flax.linen.Conv`, whatever `packed` is.

    Attributes:
      channels: output channels of one example.
      size: height and width of the kernel.
      stride: stride in both directions.
      dtype: dtype of the computation.
      kernel_init: draws the kernel, float32 (size, size, inputs, channels).
      depthwise: whether to convolve each channel separately; `channels` must then equal the input's channels,
        and the kernel has 1 input.
      packed: number of examples per row.
    """

    channels: int
    size: int
    stride: int
    dtype: str
    kernel_init: nn.initializers.Initializer
    depthwise: bool = False
    packed: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolves (batch / packed, height, width, packed x channels)."""
        inputs = 1 if self.depthwise else x.shape[-1] // self.packed
        shape = (self.size, self.size, inputs, self.channels)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        if self.depthwise:
            # The last axis of a depthwise kernel is the channels.
            kernel = jnp.tile(kernel, self.packed)
        elif self.packed > 1:
            kernel = _block_diagonal(kernel, self.packed)
        # Round after copying, so that the gradients of the copies are added in float32.
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        groups = x.shape[-1] if self.depthwise else 1
        return convolve(x, kernel, (self.stride, self.stride), "SAME", feature_group_count=groups)


def _block_diagonal(kernel: jax.Array, count: int) -> jax.Array:
    """Repeats (height, width, inputs, channels) `count` times as a block-diagonal kernel."""
    height, width, inputs, channels = kernel.shape
    # (height, width, count, inputs, count, channels), zero between different examples.
    blocks = kernel[:, :, None, :, None] * jnp.eye(count)[:, None, :, None]
    return blocks.reshape(height, width, count * inputs, count * channels)
