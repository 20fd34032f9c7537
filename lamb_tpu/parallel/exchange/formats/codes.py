"""Codes of a format's values, and words in which they lie densely.

A code is the value's sign, stored exponent and mantissa, as in IEEE 754. Codes of 8 bits take a
byte and codes of 4 bits half of one. Other widths are as dense: 32 codes of 5 bits are five words.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.parallel.exchange.formats.casting import (
    INFINITY,
    MAGNITUDE,
    bits_of,
    steps_below_normal,
)
from lamb_tpu.parallel.exchange.formats.format import Format

_WORD = 32


@functools.partial(jax.jit, static_argnames="fmt")
def encode(values: jax.Array, fmt: Format) -> jax.Array:
    """Returns the codes of values that the format has, as `cast` returns them.

    Two kinds of values have no code of their own. In the style 'cpd', the value past the largest
    finite one gets that of infinity. Without mantissa bits, so does NaN.

    Args:
      values: float32.
      fmt: the format.

    Returns:
      Codes in the lower `fmt.bits` bits of uint32, of the same shape.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    magnitude, mantissa_bits = bits & MAGNITUDE, fmt.mantissa_bits
    dropped = 23 - mantissa_bits
    code = (magnitude >> dropped) - (127 - fmt.bias << mantissa_bits)
    if fmt.exponent_bits < 8:
        steps = steps_below_normal(magnitude, fmt)
        code = jnp.where(magnitude < bits_of(fmt.smallest_normal), steps, code)
    if fmt.style == "fn":
        code = jnp.where(magnitude > INFINITY, (1 << fmt.bits - 1) - 1, code)
    elif fmt.reserved:
        infinite = (1 << fmt.exponent_bits) - 1 << mantissa_bits
        if mantissa_bits:
            # A NaN keeps the first bits of its payload, or gets one, so as not to be infinite.
            payload = jnp.maximum(magnitude - INFINITY >> dropped, 1)
            not_finite = jnp.where(magnitude > INFINITY, infinite + payload, infinite)
            code = jnp.where(magnitude >= INFINITY, not_finite, code)
        else:
            code = jnp.where(magnitude >= INFINITY, infinite, code)
    sign = lax.bitcast_convert_type(bits, jnp.uint32) >> 31 << fmt.bits - 1
    return lax.bitcast_convert_type(code, jnp.uint32) | sign


@functools.partial(jax.jit, static_argnames="fmt")
def decode(codes: jax.Array, fmt: Format) -> jax.Array:
    """Returns the values of codes, exactly, as float32; of the same shape.

    Args:
      codes: unsigned integers; bits beyond the lower `fmt.bits` must be zero.
      fmt: the format.
    """
    codes, mantissa_bits = codes.astype(jnp.uint32), fmt.mantissa_bits
    sign = codes >> fmt.bits - 1 << 31
    code = lax.bitcast_convert_type(codes, jnp.int32) & (1 << fmt.bits - 1) - 1
    dropped = 23 - mantissa_bits
    bits = (code << dropped) + (127 - fmt.bias << 23)
    if fmt.exponent_bits < 8:
        # Below 2^23, so the conversion is exact, and so is the product.
        small = code.astype(jnp.float32) * jnp.float32(fmt.step)
        small = lax.bitcast_convert_type(small, jnp.int32)
        bits = jnp.where(code < 1 << mantissa_bits, small, bits)
    if fmt.style == "fn":
        bits = jnp.where(code == (1 << fmt.bits - 1) - 1, bits_of(math.nan), bits)
    elif fmt.reserved:
        infinite = (1 << fmt.exponent_bits) - 1 << mantissa_bits
        bits = jnp.where(code >= infinite, INFINITY + (code - infinite << dropped), bits)
    whole = lax.bitcast_convert_type(bits, jnp.uint32) | sign
    return lax.bitcast_convert_type(whole, jnp.float32)


def group_size(bits: int) -> int:
    """The least number of codes that fill whole words: 4 of 8 bits, 32 of 5 bits."""
    return _WORD // math.gcd(bits, _WORD)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def pack(codes: jax.Array, bits: int, axis: int = -2) -> jax.Array:
    """Packs codes densely, whole rows at a time.

    Groups of `group_size(bits)` codes, G, fill W = G * bits / 32 words. A group lies along an axis
    that is not the last, so that only contiguous rows are shifted and joined.

    Args:
      codes: uint32, (..., G, ..., n), each below 2^bits.
      bits: 1 to 32.
      axis: the axis of G.

    Returns:
      uint32 words, (..., W, ..., n).
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
            elif -bits < shift < 0:  # begun in the word before
                parts.append(row >> -shift)
        packed.append(functools.reduce(operator.or_, parts))
    return jnp.stack(packed, axis)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def unpack(words: jax.Array, bits: int, axis: int = -2) -> jax.Array:
    """Returns the codes that `pack` packed: uint32, (..., G, ..., n) of words (..., W, ..., n)."""
    size, mask = group_size(bits), jnp.uint32((1 << bits) - 1)
    if size * bits == _WORD:
        # No code spans two words: one operation on all rows.
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
