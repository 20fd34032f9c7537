"""Codes and packed words: every code of every format of 16 bits or fewer, there and back."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lamb_tpu.parallel.exchange.formats import (
    Format,
    cast,
    decode,
    encode,
    group_size,
    pack,
    unpack,
)
from tests.marks import some
from tests.parallel.exchange.formats.test_casting import values_of
from tests.parallel.exchange.formats.test_format import NAMED

ALL = [
    Format(exponent_bits, mantissa_bits, style)
    for style in ("ieee", "fn", "finite")
    for exponent_bits in range(1, 9)
    for mantissa_bits in range(style == "fn", 16 - exponent_bits)
    if exponent_bits < 8 or style == "ieee"
]
SHORT = [
    fmt
    for fmt in ALL
    if fmt in NAMED.values() or (fmt.exponent_bits, fmt.mantissa_bits) in ((3, 0), (1, 1), (8, 0))
]


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(codes: jax.Array, fmt: Format) -> tuple[jax.Array, ...]:
    values = decode(codes, fmt)
    size = group_size(fmt.bits)
    filled = jnp.pad(codes, (0, -codes.size % size)).reshape(size, -1)
    again = unpack(pack(filled, fmt.bits), fmt.bits).ravel()
    return values, encode(values, fmt), again[: codes.size], cast(values, fmt)


@pytest.mark.parametrize("fmt", some(ALL, SHORT), ids=lambda fmt: f"{fmt}-{fmt.style}")
def test_every_code(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint32)
    values, again, unpacked, rounded = map(np.asarray, there_and_back(codes, fmt))
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(unpacked, codes)
    half = len(codes) // 2
    positive = values[:half]
    expected = values_of(fmt)
    np.testing.assert_array_equal(positive[: len(expected)], expected)
    assert not np.isfinite(positive[len(expected) :]).any()
    np.testing.assert_array_equal(values[half:], -positive)
    assert np.signbit(values[half])
    np.testing.assert_array_equal(rounded, values)  # they are values of the format


@pytest.mark.parametrize("name", NAMED)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    fmt, dtype = NAMED[name], np.dtype(getattr(ml_dtypes, name, name))
    codes = np.arange(2**fmt.bits, dtype=np.uint32)
    stored = codes.astype(f"uint{8 * dtype.itemsize}").view(dtype)
    np.testing.assert_array_equal(decode(codes, fmt), stored.astype(np.float32))


def test_values_without_a_code_of_their_own() -> None:
    cpd = Format(4, 3, "cpd")
    values = cast(jnp.float32([255, -255, np.inf]), cpd)
    np.testing.assert_array_equal(values, [256, -256, np.inf])
    np.testing.assert_array_equal(decode(encode(values, cpd), cpd), [np.inf, -np.inf, np.inf])
    four = Format(3, 0)
    assert decode(encode(jnp.float32(np.nan), four), four) == np.inf


def test_nan_stays_nan_whatever_its_payload() -> None:
    quiet = np.uint32([0x7F800001, 0x7FC00000, 0xFFFFFFFF]).view(np.float32)
    for fmt in (Format(5, 2), Format(4, 3, "cpd"), Format(4, 3, "fn"), Format(8, 7)):
        assert np.isnan(decode(encode(jnp.asarray(quiet), fmt), fmt)).all()


@pytest.mark.parametrize("bits", some(range(1, 33), (1, 3, 4, 8, 31, 32)))
def test_words_are_dense(bits: int) -> None:
    size = group_size(bits)
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (3, size, 5), dtype=np.uint32)
    words = pack(jnp.asarray(codes), bits)
    assert words.dtype == jnp.uint32 and words.shape == (3, size * bits // 32, 5)
    np.testing.assert_array_equal(unpack(words, bits), codes)
    first = pack(jnp.asarray(np.moveaxis(codes, -2, 0)), bits, 0)
    np.testing.assert_array_equal(first, np.moveaxis(words, -2, 0))
    np.testing.assert_array_equal(unpack(first, bits, 0), np.moveaxis(codes, -2, 0))


def test_words_by_hand() -> None:
    """The first code of a column is in the lowest bits; one of 5 bits spans two words."""
    [[a, b]] = np.asarray(pack(jnp.arange(1, 9, dtype=jnp.uint32).reshape(4, 2), 8))
    assert (a, b) == (0x07050301, 0x08060402)
    [[a]] = np.asarray(pack(jnp.arange(8, dtype=jnp.uint32)[:, None], 4))
    assert a == 0x76543210
    codes = np.uint32([1, 0, 0, 0, 0, 0, 31, *[0] * 25])[:, None]  # the seventh begins at bit 30
    words = np.asarray(pack(jnp.asarray(codes), 5))[:, 0]
    np.testing.assert_array_equal(words, [0xC0000001, 7, 0, 0, 0])
