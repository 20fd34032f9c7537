"""Rounding of float32 values to a format of fewer bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.parallel.exchange.formats.format import Format

# Of float32's bits, read as a signed integer.
SIGN = np.int32(-(2**31))
MAGNITUDE = np.int32(2**31 - 1)
INFINITY = 0xFF << 23
_IMPLICIT = 1 << 23


@functools.partial(jax.jit, static_argnames="fmt")
def cast(x: jax.Array, fmt: Format, key: jax.Array | None = None) -> jax.Array:
    """Rounds each value to one that `fmt` has, to nearest or at random.

    It reads and writes every value once: some fifteen operations on its bits, the same for all
    values, so that XLA fuses them.

    Args:
      x: float32 values, of any shape.
      fmt: the format.
      key: None rounds to nearest. With a key, a value between two neighbours becomes the upper one
        with the probability that leaves its expectation unchanged.

    Returns:
      Values of `fmt` as float32, of the same shape. In the style 'cpd' one more: 2 to the power
      `fmt.largest_exponent + 1`.

    Raises:
      ValueError: `x` is not float32, or `key` is given for a format of CPD, which rounds to
        nearest.
    """
    if x.dtype != jnp.float32:
        raise ValueError(f"x must be float32, not {x.dtype}")
    if key is not None and fmt.style == "cpd":
        raise ValueError("CPD rounds to nearest, so its formats take no key")
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude, sign = bits & MAGNITUDE, bits & SIGN
    noise = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    rounded = _normal(magnitude, fmt, noise)
    if fmt.exponent_bits < 8:
        steps = _steps(magnitude, fmt, noise).astype(jnp.float32) * np.float32(fmt.step)
        small = lax.bitcast_convert_type(steps, jnp.int32)
        rounded = jnp.where(magnitude < bits_of(fmt.smallest_normal), small, rounded)
    elif fmt.style == "cpd":
        rounded = jnp.where(magnitude < _IMPLICIT, 0, rounded)
    rounded = _end(magnitude, rounded, fmt)
    if fmt.style == "cpd":
        sign = jnp.where((magnitude > 0) & (magnitude < _IMPLICIT), 0, sign)
    return lax.bitcast_convert_type(rounded | sign, jnp.float32)


def bits_of(value: float) -> int:
    """The bits of a positive float32 value as an integer."""
    return int(np.float32(value).view(np.int32))


def steps_below_normal(magnitude: jax.Array, fmt: Format) -> jax.Array:
    """Rounds positive values to whole numbers of `fmt.step`, to nearest, ties to even.

    Args:
      magnitude: int32 bits of float32 values below `fmt.smallest_normal`; others give nonsense.
      fmt: a format with less than 8 exponent bits.
    """
    # Among float32 values of this size, neighbours are one step apart. So the addition rounds as is
    # wanted, and the difference of the bits is the number of steps.
    base = np.float32(fmt.step * 2.0**23)
    shifted = lax.bitcast_convert_type(magnitude, jnp.float32) + base
    return lax.bitcast_convert_type(shifted, jnp.int32) - bits_of(float(base))


def _normal(magnitude: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """Rounds the mantissa; what carries goes into the exponent, as it should."""
    dropped = 23 - fmt.mantissa_bits
    if not dropped:
        return magnitude
    if noise is not None:
        added = (noise >> (32 - dropped)).astype(jnp.int32)
    else:
        # Without mantissa bits the last bit kept is the implicit one.
        odd = magnitude >> dropped & 1 if fmt.mantissa_bits else magnitude >= _IMPLICIT
        added = odd.astype(jnp.int32) + ((1 << dropped - 1) - 1)
    return (magnitude + added) & -(1 << dropped)


def _end(magnitude: jax.Array, rounded: jax.Array, fmt: Format) -> jax.Array:
    """Replaces what is too large, infinite or NaN."""
    finite, largest = magnitude < INFINITY, bits_of(fmt.largest)
    if fmt.style == "finite":
        rounded = jnp.where(finite, jnp.minimum(rounded, largest), largest)
        return jnp.where(magnitude > INFINITY, 0, rounded)
    if fmt.style == "fn":
        nan = bits_of(np.nan)
        return jnp.where(finite & (rounded <= largest), rounded, nan)
    limit = 128 + fmt.largest_exponent << 23
    over = (magnitude if fmt.style == "cpd" else rounded) >= limit
    return jnp.where(finite, jnp.where(over, INFINITY, rounded), magnitude)


def _steps(magnitude: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """The number of steps to which values below the normal ones are rounded."""
    if noise is None and fmt.style != "cpd":
        return steps_below_normal(magnitude, fmt)
    dropped = 23 - fmt.mantissa_bits
    # Bits by which the significand moves out of the format, beyond the `dropped` of a normal value;
    # 31 leave nothing of it.
    beyond = jnp.maximum(128 - fmt.bias - (magnitude >> 23), 0)
    significand = magnitude & _IMPLICIT - 1 | _IMPLICIT
    if noise is None:
        kept = significand >> jnp.minimum(beyond, 31)
        if not dropped:
            return kept
        return (kept + ((1 << dropped - 1) - 1) + (kept >> dropped & 1)) >> dropped
    # No more than 31 bits of noise are added, in an unsigned integer: of what is smaller still, the
    # last bits are cut off.
    total = dropped + beyond
    kept = (significand >> jnp.clip(total - 31, 0, 31)).astype(jnp.uint32)
    total = jnp.clip(total, 1, 31).astype(jnp.uint32)
    return ((kept + (noise >> (32 - total))) >> total).astype(jnp.int32)
