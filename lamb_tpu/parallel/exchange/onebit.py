r"""One bit a value: signs with one scale, and error feedback on both ways.

Each device sends to each other device, the server of a chunk, the packed signs of that chunk and
one scale. The server adds the chunks up, compresses the sum in the same way, and sends it to all.
What a compression loses is added before the next one: by the device, and by the server.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.optim import checks
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import norms
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.joined import split


@dataclasses.dataclass(frozen=True)
class OneBit(Exchange):
    r"""Sends signs, eight to a byte, and the root mean square of what they stand for.

    With :math:`u_k` the values of device k plus its error, the chunk s of the sum is

    .. math::
      c_k &= \|u_k\| / \sqrt{N} \, \mathrm{sgn}(u_k), \quad e_k = u_k - c_k \\
      y_s &= \sum_k c_{k,s} + e'_s, \quad
      C_s = \|y_s\| / \sqrt{N / n} \, \mathrm{sgn}(y_s), \quad e'_s = y_s - C_s

    where sgn(0) = 1, N is the padded length and n the number of devices. Padding counts in N, as in
    DeepSpeed. A device sends N / 8 bytes (n - 1) / n times in both directions, 1/32 of float32's.

    Attributes:
      axes: the mesh axes to sum over.
      num_devices: n, the number of devices along these axes.
      per_leaf: one scale for each leaf, as in 1-bit Adam; False for one buffer of all leaves with
        one scale, as in 1-bit LAMB. Either way all leaves are sent together.
      multiple: a chunk's length is a multiple of it, itself one of 8. DeepSpeed's is the least
        common multiple of n and 8.

    The residual has in `device` the flat errors of this device, a tuple with one vector a buffer,
    and in `split` those of its chunks as a server.

    References:
      Tang et al., 1-bit Adam, arXiv:2102.02888; NcclBackend.compressed_allreduce of DeepSpeed,
      which gives the mean where this gives the sum.
    """

    axes: tuple[str, ...]
    num_devices: int
    per_leaf: bool = True
    multiple: int = 8

    def __post_init__(self) -> None:
        checks.check_flag("per_leaf", self.per_leaf)
        checks.check_whole("multiple", self.multiple, lowest=8)
        if self.multiple % 8:
            raise ValueError(f"multiple must be a multiple of 8, not {self.multiple!r}")

    def init(self, params: Any) -> Residual:
        lengths = [self._padded(sum(sizes)) for sizes in self._buffers(params)]
        return Residual(
            device=tuple(jnp.zeros(length, jnp.float32) for length in lengths),
            split=tuple(jnp.zeros(length // self.num_devices, jnp.float32) for length in lengths),
        )

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
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
        # From here on rows are chunks: row i is for device i. There is one scale a buffer.
        chunks = [values.reshape(self.num_devices, -1) for values in sent]
        scales = jnp.stack([norms.root_mean_square(values) for values in sent])
        errors = tuple(
            values - _signed(values, scale) for values, scale in zip(sent, scales, strict=True)
        )
        widths = [chunk.shape[1] // 8 for chunk in chunks]
        packed = _with_scales([pack(chunk) for chunk in chunks], scales)
        packed = lax.all_to_all(packed, self.axes, 0, 0, tiled=True)
        scales = _scales(packed, sum(widths))  # (devices, buffers)
        summed = [
            jnp.sum(unpack(rows, scales[:, index]), 0) + error
            for index, (rows, error) in enumerate(
                zip(split(packed, widths), residual.split, strict=True)
            )
        ]
        scales = jnp.stack([norms.root_mean_square(chunk) for chunk in summed])
        server_errors = tuple(
            chunk - _signed(chunk, scale) for chunk, scale in zip(summed, scales, strict=True)
        )
        packed = _with_scales([pack(chunk[None]) for chunk in summed], scales)
        packed = collectives.gather_rows(packed[0], self.axes)
        scales = _scales(packed, sum(widths))
        whole = [
            unpack(rows, scales[:, index]).ravel()
            for index, rows in enumerate(split(packed, widths))
        ]
        pieces = [
            piece
            for values, sizes in zip(whole, buffers, strict=True)
            for piece in split(values, sizes)  # without the padding
        ]
        sums = [
            piece.reshape(leaf.shape).astype(leaf.dtype)
            for piece, leaf in zip(pieces, leaves, strict=True)
        ]
        return treedef.unflatten(sums), Residual(errors, server_errors, residual.whole)

    def _buffers(self, tree: Any) -> list[list[int]]:
        """The sizes of the leaves of each buffer."""
        leaves = jax.tree.leaves(tree)
        for leaf in leaves:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise ValueError(f"onebit sends signs, which complex numbers ({leaf.dtype}) lack")
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        if self.per_leaf:
            return [[size] for size in sizes]
        return [sizes] if sizes else []

    def _padded(self, length: int) -> int:
        unit = self.num_devices * self.multiple
        return -(-length // unit) * unit


def pack(values: jax.Array) -> jax.Array:
    """Packs signs into bytes, (rows, 8 w) to (rows, w) of uint8; a value >= 0 gives the bit 1.

    Bit i of byte j is that of the value i w + j: eight long slices, not eight neighbours, which a
    TPU would have to shuffle.
    """
    rows, width = values.shape
    bits = (values.reshape(rows, 8, *collectives.lane_shape(width // 8)) >= 0).astype(jnp.uint8)
    packed = functools.reduce(operator.or_, (bits[:, i] << i for i in range(8)))
    return packed.reshape(rows, -1)


def unpack(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns scale or -scale for each sign: (rows, w) and (rows,) to (rows, 8 w), see `pack`."""
    rows, width = packed.shape
    shape = collectives.lane_shape(width)
    ones = (1,) * len(shape)
    places = jnp.arange(8, dtype=jnp.uint8).reshape(1, 8, *ones)
    bits = (packed.reshape(rows, 1, *shape) >> places) & jnp.uint8(1)
    scales = scales.reshape(rows, 1, *ones)
    return jnp.where(bits != 0, scales, -scales).reshape(rows, -1)


def _with_scales(packed: list[jax.Array], scales: jax.Array) -> jax.Array:
    """Joins packed signs of (rows, bytes), and appends the bytes of the scales to each row."""
    tail = lax.bitcast_convert_type(scales, jnp.uint8).ravel()
    return jnp.concatenate([*packed, jnp.tile(tail, (len(packed[0]), 1))], 1)


def _scales(packed: jax.Array, width: int) -> jax.Array:
    """Returns the scales that `_with_scales` put behind `width` bytes, (rows, buffers)."""
    tail = packed[:, width:].reshape(len(packed), -1, 4)
    return lax.bitcast_convert_type(tail, jnp.float32)


def _signed(values: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(values >= 0, scale, -scale)
