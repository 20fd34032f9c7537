"""Auto-precision scaling (APS): each layer is scaled by a power of two and sent in few bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import formats
from lamb_tpu.parallel.exchange.base import Exchange, Residual, check_range
from lamb_tpu.types import PyTree

# Values that stand for the exponent of a layer: `_EMPTY` if all its values are zero, `_NOT_FINITE`
# if one of its values is infinite or NaN.
_EMPTY, _NOT_FINITE = -(2**20), 2**20
# A layer is scaled by 2^shift in two factors. With a larger shift than this, one of the factors would
# not be a normal float32.
_LARGEST_SHIFT = 252
# Number of words in a row of the TPU's memory. A chunk of at least `_FEW_ROWS` rows is padded to full
# rows: the TPU compiler turns the all-gather of other chunks into an all-reduce, which sends twice as
# much.
_LANES = 128
_FEW_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Aps(Exchange):
    """Auto-precision scaling: sums gradients in a format of few bits, and sends packed codes.

    With N devices, one small all-reduce finds the largest exponent of N times each layer's gradient;
    the factor N prevents overflow of the sums. Each device scales the layer, without rounding, by the
    power of two that moves this exponent to the format's largest exponent, and casts the layer to the
    format. Each device adds up one chunk of the gradient: an all-to-all sends the device this chunk of
    every device's gradient, and the device adds the received chunks in the order of the devices, with
    a cast after every addition. An all-gather returns the sums to all devices. The two collectives
    send codes, packed into words.

    Results equal those of the authors' emulator CPD, which sends float32, bit for bit
    (arXiv:1911.08907; github.com/drcut/CPD, commit ddd9a67). To this end the casts are CPD's. They
    differ from correct rounding in two cases: for values about a millionth above a tie between the
    format's smallest values, and for values beyond the largest value, which the shift rules out. A
    layer is a leaf: stacked layers share one shift.

    Differences from CPD: a layer with only zeros stays zero (CPD divides zero by zero). A layer with
    an infinite or NaN value becomes NaN. Without `shift`, each device's gradient is cast before it
    is sent (CPD sends it uncast), and values that are rounded beyond the largest value become
    infinite.

    Attributes:
      exponent_bits: 2 to 8. With 8 exponent bits and 23 mantissa bits, the format is float32, and
        gradients are sent and summed unchanged.
      mantissa_bits: 0 to 23.
      shift: whether layers are scaled; False uses the format's fixed range, for comparison.
      kahan: whether sums are compensated by Kahan's method, with a cast after every operation.
    """

    exponent_bits: int = 4
    mantissa_bits: int = 3
    shift: bool = True
    kahan: bool = False

    def __post_init__(self) -> None:
        exponent, mantissa = self.exponent_bits, self.mantissa_bits
        check_range("exponent_bits", exponent, 2 <= exponent <= 8, "2 to 8")
        check_range("mantissa_bits", mantissa, 0 <= mantissa <= 23, "0 to 23")

    @property
    def format(self) -> formats.Format:
        """The format in which gradients are sent and added."""
        return formats.Format(self.exponent_bits, self.mantissa_bits)

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
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
        sums = collectives.in_buckets(self._sum, leaves)
        if self.shift:
            sums = [_scaled(part, one) for part, one in zip(sums, back, strict=True)]
        return sums

    def _sum(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Sums float32 leaves over devices as one concatenated vector; devices send only codes."""
        fmt, bits = self.format, self.format.bits
        ends = np.cumsum([leaf.size for leaf in leaves])
        group, size = formats.group_size(bits), int(ends[-1])
        columns = _num_columns(size, self.num_devices, group)
        padding = self.num_devices * group * columns - size
        flat = [leaf.ravel() for leaf in leaves]
        values = jnp.concatenate([*flat, jnp.zeros(padding, jnp.float32)])
        # The axes are devices, codes of a group, and columns. `pack` combines the codes of a group.
        chunks = values.reshape(self.num_devices, group, *collectives.lane_shape(columns))
        words = formats.pack(formats.encode(formats.cast(chunks, fmt), fmt), bits, 1)
        # Device i gets chunk i of every device, in the order of the devices.
        words = lax.all_to_all(words, self.axes, 0, 0, tiled=True)
        add = formats.kahan_sum if self.kahan else formats.sequential_sum
        total = add(words, fmt, lambda row: formats.decode(formats.unpack(row, bits, 0), fmt))
        own = formats.pack(formats.encode(total, fmt), bits, 0)
        words = collectives.gather_rows(own.ravel(), self.axes).reshape(-1, *own.shape)
        sums = formats.decode(formats.unpack(words, bits, 1), fmt).ravel()[:size]
        parts = zip(jnp.split(sums, ends[:-1]), leaves, strict=True)
        return [part.reshape(leaf.shape) for part, leaf in parts]


def _exponent(leaf: jax.Array, num_devices: int) -> jax.Array:
    """Returns the exponent of the smallest power of two that bounds all values times `num_devices`."""
    bits = lax.bitcast_convert_type(leaf, jnp.int32) & np.int32(2**31 - 1)
    # If the bits are read as integers, infinity is larger than all numbers, and NaN larger still.
    largest = lax.bitcast_convert_type(jnp.max(bits, initial=0), jnp.float32)
    product = lax.bitcast_convert_type(largest * num_devices, jnp.int32) & np.int32(2**31 - 1)
    stored, mantissa = product >> 23, product & (1 << 23) - 1
    exponent = stored - 127 + (mantissa != 0).astype(jnp.int32)
    exponent = jnp.where(stored == 0, _EMPTY, exponent)  # treats subnormal values as zero
    return jnp.where(stored == 255, _NOT_FINITE, exponent)


def _factors(shifts: jax.Array, exponents: jax.Array) -> tuple[list[Any], list[Any]]:
    """Returns two factors of each layer's scale, and two factors of the inverse scale.

    A single float32 factor is not enough: the shift of a layer with small gradients exceeds 127.
    """
    known = (exponents != _EMPTY) & (exponents != _NOT_FINITE)
    shifts = jnp.where(known, jnp.clip(shifts, -_LARGEST_SHIFT, _LARGEST_SHIFT), 0)
    halves = shifts >> 1, shifts - (shifts >> 1)
    there = [_power_of_two(half) for half in halves]
    back = [_power_of_two(-half) for half in halves]
    # The format may not have a code for NaN, so make the layer NaN when it is scaled back.
    back[0] = jnp.where(exponents == _NOT_FINITE, jnp.nan, back[0])
    return list(zip(*there, strict=True)), list(zip(*back, strict=True))


def _power_of_two(exponents: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(exponents + 127 << 23, jnp.float32)


def _scaled(leaf: jax.Array, factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    # Multiply by one factor after the other: their product may exceed the range of float32.
    return leaf * factors[0] * factors[1]


def _num_columns(size: int, num_devices: int, group: int) -> int:
    """Returns the number of groups of codes in each device's chunk, including padding."""
    least = max(1, -(-size // (num_devices * group)))
    return -(-least // _LANES) * _LANES if least >= _FEW_ROWS * _LANES else least
