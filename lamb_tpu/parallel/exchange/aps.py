"""Gradients sent in 4 to 16 bits, each layer shifted by a power of two first (APS)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import formats
from lamb_tpu.parallel.exchange.base import Exchange, Residual

# Exponents of layers that have none: all values are zero, or one is infinite or NaN.
_EMPTY, _NOT_FINITE = -(2**20), 2**20
# Beyond, one of the two factors of a shift would not be a normal float32.
_LARGEST_SHIFT = 252
# Words of a row of the TPU's memory. A chunk of a few rows or more takes whole ones: the TPU
# compiler turns the all-gather of others into an all-reduce, which sends twice as much.
_LANES = 128
_FEW_ROWS = 4
_BUCKET_VALUES = collectives.BUCKET_BYTES // 4


@dataclasses.dataclass(frozen=True)
class Aps(Exchange):
    """Auto-precision scaling: sums gradients in a format of few bits, and sends packed codes.

    One small all-reduce finds each layer's largest exponent, of N times the gradient for N devices.
    The layer is scaled by the power of two that puts this exponent at the end of the format's
    range, which is exact, and cast. An all-to-all takes each device's chunks to their owners, which
    add them in the order of the devices and cast after every addition. An all-gather takes the sums
    back. Both send codes, packed into words. The scale leaves room for N times the largest value,
    so that sums do not overflow.

    Numbers are those of the authors' emulator CPD, bit for bit (arXiv:1911.08907;
    github.com/drcut/CPD, commit ddd9a67), which sends float32. So the casts are CPD's: they differ
    from correct rounding just above ties of the smallest values, by a millionth of these, and
    past the largest value, which the shift rules out. A layer is a leaf: stacked layers share one
    shift. Differences from CPD: a layer without gradient stays zero, where CPD divides zero by
    zero; a layer with an infinite or NaN value becomes NaN; and without `shift` each device's
    gradient is cast before it is sent, where CPD sends it wide, and what rounds past the largest
    value is infinite.

    Attributes:
      axes: mesh axes to sum over.
      num_devices: product of their sizes.
      exponent_bits: 2 to 8. With 8 exponent and 23 mantissa bits float32 is summed as it is.
      mantissa_bits: 0 to 23.
      shift: whether layers are shifted; False is the plain format, for comparison.
      kahan: whether sums are compensated, by Kahan's method with every operation cast.
    """

    axes: tuple[str, ...]
    num_devices: int
    exponent_bits: int = 4
    mantissa_bits: int = 3
    shift: bool = True
    kahan: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.exponent_bits <= 8:
            raise ValueError(f"exponent_bits must be 2 to 8, not {self.exponent_bits}")
        if not 0 <= self.mantissa_bits <= 23:
            raise ValueError(f"mantissa_bits must be 0 to 23, not {self.mantissa_bits}")

    @property
    def format(self) -> formats.Format:
        """The format in which gradients are sent and added."""
        return formats.Format(self.exponent_bits, self.mantissa_bits, "cpd")

    def init(self, params: Any) -> Residual:
        return Residual()

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        if not jax.tree.leaves(grads) or (self.format.bits == 32 and not self.kahan):
            return collectives.all_reduce(grads, self.axes), residual
        leaves, treedef = jax.tree.flatten(grads)
        sums = self._reduce([leaf.astype(jnp.float32) for leaf in leaves])
        own = [total.astype(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]
        return treedef.unflatten(own), residual

    def _reduce(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Sums float32 leaves."""
        back: list[tuple[Any, Any]] = []
        if self.shift:
            own = jnp.stack([_exponent(leaf, self.num_devices) for leaf in leaves])
            exponents = lax.pmax(own, self.axes)
            there, back = _factors(self.format.largest_exponent - exponents, exponents)
            leaves = [_scaled(leaf, one) for leaf, one in zip(leaves, there, strict=True)]
        sums: list[jax.Array] = []
        for bucket in _buckets([leaf.size for leaf in leaves]):
            flat = [leaves[index].ravel() for index in bucket]
            total = self._sum(flat)
            ends = np.cumsum([leaf.size for leaf in flat])[:-1]
            parts = jnp.split(total, ends)
            sums += [part.reshape(leaves[i].shape) for part, i in zip(parts, bucket, strict=True)]
        if self.shift:
            sums = [_scaled(part, one) for part, one in zip(sums, back, strict=True)]
        return sums

    def _sum(self, flat: list[jax.Array]) -> jax.Array:
        """Sums flat float32 vectors, one after the other, over devices that send codes alone."""
        fmt, bits = self.format, self.format.bits
        group, size = formats.group_size(bits), sum(leaf.size for leaf in flat)
        columns = _num_columns(size, self.num_devices, group)
        padding = self.num_devices * group * columns - size
        values = jnp.concatenate([*flat, jnp.zeros(padding, jnp.float32)])
        # A chunk for each device, and in it a row for each code of a group, as `pack` takes them.
        chunks = values.reshape(self.num_devices, group, *collectives.lane_shape(columns))
        words = formats.pack(formats.encode(formats.cast(chunks, fmt), fmt), bits, 1)
        # Row i goes to device i, which gets that of every device, in the order of the devices.
        words = lax.all_to_all(words, self.axes, 0, 0, tiled=True)
        add = formats.kahan_sum if self.kahan else formats.sequential_sum
        total = add(words, fmt, lambda row: formats.decode(formats.unpack(row, bits, 0), fmt))
        own = formats.pack(formats.encode(total, fmt), bits, 0)
        words = collectives.gather_rows(own.ravel(), self.axes).reshape(-1, *own.shape)
        return formats.decode(formats.unpack(words, bits, 1), fmt).ravel()[:size]


def _exponent(leaf: jax.Array, num_devices: int) -> jax.Array:
    """Returns the least exponent of a power of two not below the leaf's values times devices."""
    bits = lax.bitcast_convert_type(leaf, jnp.int32) & np.int32(2**31 - 1)
    # As integers, infinity is above all numbers, and NaN above infinity.
    largest = lax.bitcast_convert_type(jnp.max(bits, initial=0), jnp.float32)
    product = lax.bitcast_convert_type(largest * num_devices, jnp.int32) & np.int32(2**31 - 1)
    stored, mantissa = product >> 23, product & (1 << 23) - 1
    exponent = stored - 127 + (mantissa != 0).astype(jnp.int32)
    exponent = jnp.where(stored == 0, _EMPTY, exponent)  # subnormal values count as zero
    return jnp.where(stored == 255, _NOT_FINITE, exponent)


def _factors(shifts: jax.Array, exponents: jax.Array) -> tuple[list[Any], list[Any]]:
    """Returns for each layer the two factors of its scale, and those of its inverse.

    One power of two would not do: layers of small gradients are shifted by more than 127.
    """
    known = (exponents != _EMPTY) & (exponents != _NOT_FINITE)
    shifts = jnp.where(known, jnp.clip(shifts, -_LARGEST_SHIFT, _LARGEST_SHIFT), 0)
    halves = shifts >> 1, shifts - (shifts >> 1)
    there = [_power_of_two(half) for half in halves]
    back = [_power_of_two(-half) for half in halves]
    # Codes of a sum may not tell NaN from a number, so the layer is marked here.
    back[0] = jnp.where(exponents == _NOT_FINITE, jnp.nan, back[0])
    return list(zip(*there, strict=True)), list(zip(*back, strict=True))


def _power_of_two(exponents: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(exponents + 127 << 23, jnp.float32)


def _scaled(leaf: jax.Array, factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    # One after the other: the product of the two may be outside of float32.
    return leaf * factors[0] * factors[1]


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Returns runs of leaves, each of which is sent by itself."""
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        # A leaf that is larger than a bucket has its own.
        if not buckets or filled + size > _BUCKET_VALUES:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def _num_columns(size: int, num_devices: int, group: int) -> int:
    """Returns the number of groups of codes in each device's chunk, padding included."""
    least = max(1, -(-size // (num_devices * group)))
    return -(-least // _LANES) * _LANES if least >= _FEW_ROWS * _LANES else least
