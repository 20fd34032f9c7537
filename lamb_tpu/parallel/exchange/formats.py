"""Number formats of few bits: casts, codes, packed words, and sums with rounding after each addition.

`cast` rounds float32 values to a format as the emulator CPD does (github.com/drcut/CPD, commit
ddd9a67). Sums have CPD's order of operations. `encode` and `decode` convert between values and
integer codes, `pack` and `unpack` between codes and words of 32 bits without unused bits: for
example, 32 codes of 5 bits fill five words. All functions work under jit. For casts that round
correctly, use the package `ml_dtypes`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Masks for the bits of a float32 value, read as a signed integer.
SIGN = np.int32(-(2**31))
MAGNITUDE = np.int32(2**31 - 1)
INFINITY = 0xFF << 23
_IMPLICIT = 1 << 23
_WORD = 32  # bits


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign, an exponent and a mantissa, as in IEEE 754.

    The exponent bias is 2^(exponent_bits - 1) - 1, the largest stored exponent encodes infinity and
    NaN, and there are subnormal numbers. Values are rounded to the nearest value of the format, ties
    to the even significand. Without mantissa bits, the significand of every power of two is odd, so
    ties round up.

    Attributes:
      exponent_bits: 1 to 8.
      mantissa_bits: 0 to 23.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent bias, which is added to an exponent before it is stored."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest value."""
        return 2**self.exponent_bits - 2 - self.bias

    @property
    def smallest_normal(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """Distance between neighbouring values below `smallest_normal`."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def __str__(self) -> str:
        return f"e{self.exponent_bits}m{self.mantissa_bits}"


@functools.partial(jax.jit, static_argnames="fmt")
def cast(x: jax.Array, fmt: Format) -> jax.Array:
    """Rounds each value to the nearest value of `fmt`, as the emulator CPD does.

    CPD (github.com/drcut/CPD, commit ddd9a67, CPDtorch/quant/quant_cuda/float_kernel.cu) differs
    from correct rounding in three ways. It checks before rounding whether a value is too large, so
    a value with the largest exponent may be rounded up to 2^(largest exponent + 1). Below the normal
    numbers it drops bits before it rounds, so values just above a tie count as ties. Subnormal
    numbers of float32 become +0.

    XLA fuses the cast's bit operations, about fifteen, so every value is read and written once.

    Args:
      x: float32 values, of any shape.
      fmt: the format.

    Returns:
      Values of `fmt` as float32, in the shape of `x`. In addition, values may be rounded to
      +-2^(fmt.largest_exponent + 1), which is not a value of the format.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude, sign = bits & MAGNITUDE, bits & SIGN
    rounded = _normal(magnitude, fmt)
    if fmt.exponent_bits < 8:
        steps = _steps(magnitude, fmt).astype(jnp.float32) * np.float32(fmt.step)
        small = lax.bitcast_convert_type(steps, jnp.int32)
        rounded = jnp.where(magnitude < bits_of(fmt.smallest_normal), small, rounded)
    else:
        rounded = jnp.where(magnitude < _IMPLICIT, 0, rounded)
    over = magnitude >= 128 + fmt.largest_exponent << 23
    finite = jnp.where(over, INFINITY, rounded)
    rounded = jnp.where(magnitude < INFINITY, finite, magnitude)
    sign = jnp.where((magnitude > 0) & (magnitude < _IMPLICIT), 0, sign)
    return lax.bitcast_convert_type(rounded | sign, jnp.float32)


def bits_of(value: float) -> int:
    """Returns the bits of a positive float32 value as an integer."""
    return int(np.float32(value).view(np.int32))


def _normal(magnitude: jax.Array, fmt: Format) -> jax.Array:
    """Rounds the mantissa of normal numbers; a carry correctly increments the exponent."""
    dropped = 23 - fmt.mantissa_bits
    if not dropped:
        return magnitude
    # Without mantissa bits, the last remaining bit of the significand is the implicit leading 1.
    odd = magnitude >> dropped & 1 if fmt.mantissa_bits else magnitude >= _IMPLICIT
    added = odd.astype(jnp.int32) + ((1 << dropped - 1) - 1)
    return (magnitude + added) & -(1 << dropped)


def _steps(magnitude: jax.Array, fmt: Format) -> jax.Array:
    """Rounds values below the normal numbers; returns them as multiples of `fmt.step`."""
    dropped = 23 - fmt.mantissa_bits
    # Number of bits that are lost in addition to the `dropped` bits of a normal value. A shift by 31
    # leaves 0.
    beyond = jnp.maximum(128 - fmt.bias - (magnitude >> 23), 0)
    significand = magnitude & _IMPLICIT - 1 | _IMPLICIT
    shifted = significand >> jnp.minimum(beyond, 31)
    if not dropped:
        return shifted
    return (shifted + ((1 << dropped - 1) - 1) + (shifted >> dropped & 1)) >> dropped


@functools.partial(jax.jit, static_argnames="fmt")
def encode(values: jax.Array, fmt: Format) -> jax.Array:
    """Returns the codes of `values`, which `cast` returned, in the lower `fmt.bits` bits of uint32.

    A code is the value's sign, stored exponent and mantissa, as in IEEE 754. The additional value
    that `cast` may return, 2^(fmt.largest_exponent + 1), gets the code of infinity. Without mantissa
    bits NaN also gets the code of infinity.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    magnitude, mantissa_bits = bits & MAGNITUDE, fmt.mantissa_bits
    dropped = 23 - mantissa_bits
    code = (magnitude >> dropped) - (127 - fmt.bias << mantissa_bits)
    if fmt.exponent_bits < 8:
        # Add a number so large that neighbouring float32 values are one step apart. The difference
        # of the bits is then the number of steps.
        base = np.float32(fmt.step * 2.0**23)
        shifted = lax.bitcast_convert_type(magnitude, jnp.float32) + base
        steps = lax.bitcast_convert_type(shifted, jnp.int32) - bits_of(float(base))
        code = jnp.where(magnitude < bits_of(fmt.smallest_normal), steps, code)
    infinite: int | jax.Array = (1 << fmt.exponent_bits) - 1 << mantissa_bits
    if mantissa_bits:
        # A NaN keeps the first bits of its payload. If they are 0, one bit is set, because the
        # code would otherwise mean infinity.
        payload = jnp.maximum(magnitude - INFINITY >> dropped, 1)
        infinite = jnp.where(magnitude > INFINITY, infinite + payload, infinite)
    code = jnp.where(magnitude >= INFINITY, infinite, code)
    sign = lax.bitcast_convert_type(bits, jnp.uint32) >> 31 << fmt.bits - 1
    return lax.bitcast_convert_type(code, jnp.uint32) | sign


@functools.partial(jax.jit, static_argnames="fmt")
def decode(codes: jax.Array, fmt: Format) -> jax.Array:
    """Returns the exact values of codes as float32; bits above the lower `fmt.bits` must be zero."""
    codes, mantissa_bits = codes.astype(jnp.uint32), fmt.mantissa_bits
    sign = codes >> fmt.bits - 1 << 31
    code = lax.bitcast_convert_type(codes, jnp.int32) & (1 << fmt.bits - 1) - 1
    dropped = 23 - mantissa_bits
    bits = (code << dropped) + (127 - fmt.bias << 23)
    if fmt.exponent_bits < 8:
        # The code of a subnormal value is below 2^23, so the conversion and the product are exact.
        small = code.astype(jnp.float32) * jnp.float32(fmt.step)
        small = lax.bitcast_convert_type(small, jnp.int32)
        bits = jnp.where(code < 1 << mantissa_bits, small, bits)
    infinite = (1 << fmt.exponent_bits) - 1 << mantissa_bits
    bits = jnp.where(code >= infinite, INFINITY + (code - infinite << dropped), bits)
    signed = lax.bitcast_convert_type(bits, jnp.uint32) | sign
    return lax.bitcast_convert_type(signed, jnp.float32)


def group_size(bits: int) -> int:
    """Returns the smallest number of codes that fill words exactly: 4 of 8 bits, 32 of 5 bits."""
    return _WORD // math.gcd(bits, _WORD)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def pack(codes: jax.Array, bits: int, axis: int = -2) -> jax.Array:
    """Packs uint32 codes below 2^bits into words, from (..., G, ..., n) to (..., W, ..., n).

    Groups of G = `group_size(bits)` codes along `axis` fill W = G * bits / 32 words. `axis` must not
    be the last, so that contiguous rows are shifted and joined.
    """
    size = group_size(bits)
    packed = []
    for word in range(size * bits // _WORD):
        parts = []
        for place in range(size):
            shift = place * bits - word * _WORD
            row = lax.index_in_dim(codes, place, axis, keepdims=False)
            if 0 <= shift < _WORD:
                parts.append(row << shift)
            elif -bits < shift < 0:  # the code begins in the previous word
                parts.append(row >> -shift)
        packed.append(functools.reduce(operator.or_, parts))
    return jnp.stack(packed, axis)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def unpack(words: jax.Array, bits: int, axis: int = -2) -> jax.Array:
    """Inverts `pack`: returns uint32 codes (..., G, ..., n) from words (..., W, ..., n)."""
    size, mask = group_size(bits), jnp.uint32((1 << bits) - 1)
    if size * bits == _WORD:
        # No code spans two words, so one operation unpacks all rows.
        shifts = np.arange(size, dtype=np.uint32) * np.uint32(bits)
        return words >> jnp.expand_dims(shifts, range(1, words.ndim - axis % words.ndim)) & mask
    rows = [
        lax.index_in_dim(words, word, axis, keepdims=False) for word in range(words.shape[axis])
    ]
    codes = []
    for place in range(size):
        word, shift = divmod(place * bits, _WORD)
        code = rows[word] >> shift
        if shift + bits > _WORD:
            code |= rows[word + 1] << _WORD - shift
        codes.append(code & mask)
    return jnp.stack(codes, axis)


def sequential_sum(
    terms: Any, fmt: Format, value: Callable[[Any], jax.Array] = lambda term: term
) -> jax.Array:
    """Adds n terms one after the other and casts after each addition.

    Args:
      terms: pytree of arrays (n, ...); term i has entry i of each array.
      fmt: the format.
      value: function from a term to float32 values.
    """

    def add(total: jax.Array, term: Any) -> tuple[jax.Array, None]:
        return cast(total + value(term), fmt), None

    # Add one term per iteration. With several terms per iteration, XLA on a CPU recomputes values:
    # 8 terms take 12 times as long.
    return lax.scan(add, _zeros(terms, value), terms)[0]


def kahan_sum(
    terms: Any, fmt: Format, value: Callable[[Any], jax.Array] = lambda term: term
) -> jax.Array:
    """Adds n terms by Kahan's compensated sum, with a cast after each operation; see `sequential_sum`."""

    def add(carry: tuple[jax.Array, jax.Array], term: Any) -> tuple[Any, None]:
        total, error = carry  # the excess of the total over the exact sum
        added = cast(value(term) - error, fmt)
        new = cast(total + added, fmt)
        return (new, cast(cast(new - total, fmt) - added, fmt)), None

    zeros = _zeros(terms, value)
    return lax.scan(add, (zeros, zeros), terms)[0][0]


def _zeros(terms: Any, value: Callable[[Any], jax.Array]) -> jax.Array:
    one = jax.eval_shape(lambda: value(jax.tree.map(lambda leaf: leaf[0], terms)))
    return jnp.zeros(one.shape, jnp.float32)
