"""Packing of examples along the channel axis, so that few channels fill the lanes of a TPU.

A TPU computes on tiles of 8 x 128 values: for images, 8 examples by 128 channels of one pixel.
Unused lanes are computed and moved too: three quarters of them with 32 channels, 112 of 256 with
144 channels. So examples n, n + 1, ... of a device's batch share a row, with their channels one
after the other: (32, h, w, 144) becomes (8, h, w, 4 x 144), which uses 576 of 640 lanes. Operations
that treat each channel alone, such as a depthwise convolution, need no change.

The kernel of a convolution over channels gets zeros between different examples. It has `packed`
times the products, on matrix units that few channels leave idle. So packing pays on TPUs only, and
only while channels are few. `BatchNorm` of `lamb_tpu.models.norm` takes packed examples too.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.models.convolution import convolve

# Rows of a tile, and the most examples in a row: four times the stem's 32 channels fill the 128
# lanes.
_SUBLANES, _MOST = 8, 4


def examples_a_row(rows: int) -> int:
    """Returns the number of examples to pack on a device with `rows` examples: 4, 2 or 1.

    It is 1 if packing does not pay: on devices other than TPUs, and if the packed examples do not
    fill whole tiles of 8. It is also 1 outside shard_map, where `rows` are those of many devices,
    so that a packed example could belong to two devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The device that the program is compiled for, which need not be the one that compiles it.
    device = mesh.abstract_device
    if not mesh.manual_axes or device is None or device.platform != "tpu":
        return 1
    return _fitting(rows)


def _fitting(rows: int) -> int:
    """
    >>> [_fitting(rows) for rows in (4, 8, 16, 24, 32, 36, 128)]
    [1, 1, 2, 1, 4, 1, 4]
    """
    return 1 if rows % _SUBLANES else math.gcd(rows // _SUBLANES, _MOST)


def pack(x: jax.Array, packed: int) -> jax.Array:
    """Packs (batch, ..., channels) to (batch / packed, ..., packed x channels).

    >>> print(pack(jnp.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]), 2))
    [[[1 2 5 6]
      [3 4 7 8]]]
    """
    rows, *places, channels = x.shape
    x = x.reshape(rows // packed, packed, *places, channels)
    return jnp.moveaxis(x, 1, -2).reshape(rows // packed, *places, packed * channels)


def unpack(x: jax.Array, packed: int) -> jax.Array:
    """The inverse of `pack`."""
    rows, *places, channels = x.shape
    x = x.reshape(rows, *places, packed, channels // packed)
    return jnp.moveaxis(x, -2, 1).reshape(rows * packed, *places, channels // packed)


class Conv(nn.Module):
    """A square convolution of packed examples, without bias, padded as TensorFlow's SAME.

    Its parameter is that of `flax.linen.Conv`, whatever `packed` is.

    Attributes:
      channels: output channels of one example.
      size: height and width of the kernel.
      stride: stride in both directions.
      dtype: dtype of the computation.
      kernel_init: draws the kernel, float32 (size, size, inputs, channels).
      depthwise: convolve each channel by itself; `channels` are then the input's, and inputs is 1.
      packed: number of examples in a row.
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
        """(batch / packed, height, width, packed x channels), smaller by the stride."""
        inputs = 1 if self.depthwise else x.shape[-1] // self.packed
        shape = (self.size, self.size, inputs, self.channels)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        if self.depthwise:
            # The last axis of a depthwise kernel is the channels.
            kernel = jnp.tile(kernel, self.packed)
        elif self.packed > 1:
            kernel = _block_diagonal(kernel, self.packed)
        # Rounded after copying, so that the gradients of the copies are added in float32.
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        groups = x.shape[-1] if self.depthwise else 1
        return convolve(x, kernel, (self.stride, self.stride), "SAME", feature_group_count=groups)


def _block_diagonal(kernel: jax.Array, count: int) -> jax.Array:
    """Repeats (height, width, inputs, channels) `count` times as a block-diagonal kernel."""
    height, width, inputs, channels = kernel.shape
    # (height, width, count, inputs, count, channels), zero between different examples.
    own = jnp.eye(count)[:, None, :, None]
    blocks = kernel[:, :, None, :, None] * own
    return blocks.reshape(height, width, count * inputs, count * channels)
