r"""One bit per value: signs with one scale, and error feedback in both directions.

Each device is the server of one chunk of the gradient. Every device sends the packed signs of each
chunk, and a scale, to the chunk's server. The server adds up the devices' chunks, compresses the sum
in the same way, and sends the compressed sum to all devices. Devices and servers add the error of
each compression to the values of the next compression.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.optim import checks
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.collectives import split
from lamb_tpu.parallel.exchange import norms
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class OneBit(Exchange):
    r"""Sends signs, eight to a byte, and the root mean square of the values.

    Let :math:`u_k` be the values of device k plus its error. Chunk s of the result is :math:`C_s`:

    .. math::
      c_k &= \|u_k\| / \sqrt{N} \, \mathrm{sgn}(u_k), \quad e_k = u_k - c_k \\
      y_s &= \sum_k c_{k,s} + e'_s, \quad
      C_s = \|y_s\| / \sqrt{N / n} \, \mathrm{sgn}(y_s), \quad e'_s = y_s - C_s

    where sgn(0) = 1, n is the number of devices and N the length, including padding as in DeepSpeed.
    A device sends (n - 1) / n * N / 8 bytes in each direction, 1/32 of the bytes of float32.

    Attributes:
      per_leaf: True: each leaf is a buffer with its own scale, as in 1-bit Adam. False: all leaves
        form one buffer with one scale, as in 1-bit LAMB. In both cases all leaves are sent together.
      multiple: the length of a chunk is a multiple of this number, which must be a multiple of 8.
        DeepSpeed uses the least common multiple of n and 8.

    In the residual, `device` has the errors of this device, a tuple with a flat vector per buffer,
    and `split` has the errors that this device makes as a server, for its chunk of each buffer.

    References:
      Tang et al., 1-bit Adam, arXiv:2102.02888; DeepSpeed's NcclBackend.compressed_allreduce, which
      returns the mean instead of the sum.
    """

    per_leaf: bool = True
    multiple: int = 8

    def __post_init__(self) -> None:
        checks.check_flag("per_leaf", self.per_leaf)
        checks.check_whole("multiple", self.multiple, lowest=8)
        if self.multiple % 8:
            raise ArgumentError("multiple", self.multiple, "is not a multiple of 8", "use 8 or 16")

    def init(self, params: Params) -> Residual:
        lengths = [self._padded(sum(sizes)) for sizes in self._buffers(params)]
        return Residual(
            device=tuple(jnp.zeros(length, jnp.float32) for length in lengths),
            split=tuple(jnp.zeros(length // self.num_devices, jnp.float32) for length in lengths),
        )

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        leaves, treedef = jax.tree.flatten(grads)
        buffers = self._buffers(grads)
        flat = [jnp.ravel(leaf).astype(jnp.float32) for leaf in leaves]
        if not self.per_leaf:
            flat = [jnp.concatenate(flat)] if flat else []
        if not flat:
            return grads, residual
        sent = [
            jnp.pad(values, (0, len(error) - len(values))) + error
            for values, error in zip(flat, residual.device, strict=True)
        ]
        packed, errors = _compressed(sent, self.num_devices)
        packed = lax.all_to_all(packed, self.axes, 0, 0, tiled=True)
        widths = [len(error) // 8 for error in residual.split]
        received = zip(_received(packed, widths), residual.split, strict=True)
        summed = [jnp.sum(rows, 0) + error for rows, error in received]
        packed, server_errors = _compressed(summed, 1)
        packed = collectives.gather_rows(packed[0], self.axes)
        segments = [
            segment
            for rows, sizes in zip(_received(packed, widths), buffers, strict=True)
            for segment in split(rows.ravel(), sizes)  # without the padding
        ]
        sums = [
            segment.reshape(leaf.shape).astype(leaf.dtype)
            for segment, leaf in zip(segments, leaves, strict=True)
        ]
        return treedef.unflatten(sums), Residual(errors, server_errors, residual.whole)

    def _buffers(self, tree: PyTree) -> list[list[int]]:
        """Returns a list for each buffer, with the sizes of its leaves."""
        leaves = jax.tree.leaves(tree)
        for leaf in leaves:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                problem = f"cannot send complex numbers ({leaf.dtype}), which have no sign"
                raise ArgumentError("name", "onebit", problem, "use another exchange")
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        if self.per_leaf:
            return [[size] for size in sizes]
        return [sizes] if sizes else []

    def _padded(self, length: int) -> int:
        unit = self.num_devices * self.multiple
        return -(-length // unit) * unit


def pack(values: jax.Array) -> jax.Array:
    """Packs signs into bytes, from (rows, 8 w) to uint8 (rows, w); a value >= 0 gives the bit 1.

    Bit i of byte j belongs to the value with index i w + j. So packing combines eight long slices. A
    TPU would have to shuffle values to pack eight neighbours into a byte.
    """
    rows, width = values.shape
    bits = (values.reshape(rows, 8, *collectives.lane_shape(width // 8)) >= 0).astype(jnp.uint8)
    packed = functools.reduce(operator.or_, (bits[:, i] << i for i in range(8)))
    return packed.reshape(rows, -1)


def unpack(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Inverts `pack`: from signs (rows, w) and scales (rows,) to values +-scale, (rows, 8 w)."""
    rows, width = packed.shape
    shape = collectives.lane_shape(width)
    ones = (1,) * len(shape)
    shifts = jnp.arange(8, dtype=jnp.uint8).reshape(1, 8, *ones)
    bits = (packed.reshape(rows, 1, *shape) >> shifts) & jnp.uint8(1)
    scales = scales.reshape(rows, 1, *ones)
    return jnp.where(bits != 0, scales, -scales).reshape(rows, -1)


def _compressed(buffers: list[jax.Array], rows: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the packed signs of vectors with their scales, (rows, bytes), and the vectors' errors.

    Each vector is cut into `rows` rows; row i is for device i. Every row ends with all scales.
    """
    scales = jnp.stack([norms.root_mean_square(values) for values in buffers])
    errors = [
        values - jnp.where(values >= 0, scale, -scale)
        for values, scale in zip(buffers, scales, strict=True)
    ]
    tail = lax.bitcast_convert_type(scales, jnp.uint8).ravel()
    packed = [pack(values.reshape(rows, -1)) for values in buffers]
    return jnp.concatenate([*packed, jnp.tile(tail, (rows, 1))], 1), tuple(errors)


def _received(packed: jax.Array, widths: list[int]) -> list[jax.Array]:
    """Returns the values of each vector, (rows, 8 width), from bytes that `_compressed` packed."""
    tail = packed[:, sum(widths) :].reshape(len(packed), -1, 4)
    scales = lax.bitcast_convert_type(tail, jnp.float32)  # (rows, vectors)
    return [unpack(part, scales[:, i]) for i, part in enumerate(split(packed, widths))]
