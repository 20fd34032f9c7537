"""Tests formats of few bits: ranges, casts, codes of up to 16 bits, packed words, and sums.

The references are ml_dtypes, the midpoints of neighbouring values, known properties of CPD's kernel,
and loops in NumPy.
"""

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
    kahan_sum,
    pack,
    sequential_sum,
    unpack,
)
from tests.marks import some

# Formats of the package `ml_dtypes` whose largest exponent encodes infinity and NaN.
NAMED = {
    "e5m2": (Format(5, 2), ml_dtypes.float8_e5m2),
    "e4m3": (Format(4, 3), ml_dtypes.float8_e4m3),
    "e3m4": (Format(3, 4), ml_dtypes.float8_e3m4),
    "e8m7": (Format(8, 7), ml_dtypes.bfloat16),
    "e5m10": (Format(5, 10), np.float16),
}


@pytest.mark.parametrize("name", NAMED)
def test_range_of_known_formats(name: str) -> None:
    fmt, dtype = NAMED[name]
    info = ml_dtypes.finfo(dtype)
    assert (str(fmt), fmt.bits) == (name, info.bits)
    assert 2.0**fmt.largest_exponent <= float(info.max) < 2.0 ** (fmt.largest_exponent + 1)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.step == float(info.smallest_subnormal)


def test_four_bits() -> None:
    """With 3 exponent bits and no mantissa bits: bias 3, exponents -2 to 3, nothing between 0 and 2^-2."""
    fmt = Format(3, 0)
    assert (fmt.bits, fmt.largest_exponent, fmt.smallest_normal, fmt.step) == (4, 3, 0.25, 0.25)


def values_of(fmt: Format) -> np.ndarray:
    """Returns all finite non-negative values of a format, ascending, from its definition."""
    actual = []
    for stored in range(2**fmt.exponent_bits - 1):
        for mantissa in range(2**fmt.mantissa_bits):
            significand = mantissa / 2**fmt.mantissa_bits + (stored > 0)
            actual.append(significand * 2.0 ** (max(stored, 1) - fmt.bias))
    return np.float32(actual)


def bit_patterns() -> np.ndarray:
    """Returns float32 values of every exponent, with signs, infinities and NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # Add the same bits with the lower 19 set to 0, which are often ties, and the neighbours of these.
    short = bits & np.uint32(0xFFF80000)
    return np.concatenate([bits, short, short + 1, short - 1]).view(np.float32)


@pytest.mark.parametrize("name", NAMED)
def test_normal_numbers_are_cast_as_by_ml_dtypes(name: str) -> None:
    fmt, dtype = NAMED[name]
    x = bit_patterns()
    # Leave out values below the normal numbers and above the largest value, which CPD does not round
    # correctly.
    small, large = (
        np.abs(x) < fmt.smallest_normal,
        np.isfinite(x) & (np.abs(x) > values_of(fmt)[-1]),
    )
    x = x[~small & ~large]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    actual = np.asarray(cast(x, fmt))
    np.testing.assert_array_equal(actual, expected)
    known = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(actual)[known], np.signbit(expected)[known])
    assert len(x) > 2000 and np.isinf(x).any() and np.isnan(x).any()


@pytest.mark.parametrize("fields", [(1, 3), (2, 1), (3, 2), (4, 3), (5, 2), (6, 5), (7, 1)])
def test_neighbours_and_ties(fields: tuple[int, int]) -> None:
    fmt = Format(*fields)
    values = values_of(fmt)
    middles = (values[:-1] + values[1:]) / 2
    even = np.where(np.arange(len(middles)) % 2, values[1:], values[:-1])
    below, above = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))
    # Below the normal numbers, values just above a tie count as ties.
    rounded_up = np.where(middles < fmt.smallest_normal, even, values[1:])
    for sign in (1, -1):
        for x, expected in (
            (values, values),
            (below, values[:-1]),
            (middles, even),
            (above, rounded_up),
        ):
            np.testing.assert_array_equal(cast(sign * x, fmt), sign * expected)


def test_without_mantissa_bits_ties_round_up() -> None:
    x = np.float32([0.124, 0.125, 0.126, 0.374, 0.375, 0.75, 1.49, 1.5, 3, 6])
    expected = [0, 0, 0.25, 0.25, 0.5, 1, 1, 2, 4, 8]
    np.testing.assert_array_equal(cast(x, Format(3, 0)), expected)


def test_ends_of_the_range() -> None:
    """CPD's kernel checks the range before rounding, so 248 and 255 become 256, which E4M3 lacks."""
    x = np.float32([240, 247.9, 248, 255, 256, -1e9, np.inf, np.nan, 1e-42, -1e-42])
    expected = np.float32([240, 240, 256, 256, np.inf, -np.inf, np.inf, np.nan, 0, 0])
    actual = np.asarray(cast(x, Format(4, 3)))
    np.testing.assert_array_equal(actual, expected)
    assert not np.signbit(actual[8:]).any()


def test_bits_are_lost_below_the_normal_numbers() -> None:
    """A value just above half of the smallest value of E5M2 counts as a tie and becomes zero."""
    x = np.nextafter(np.float32(2**-17), np.float32(1))
    assert x.astype(NAMED["e5m2"][1]) == 2**-16 and cast(x, Format(5, 2)) == 0


@pytest.mark.optimized
def test_one_pass_over_the_memory() -> None:
    """The cast is one fusion without temporaries, and reads and writes every value once."""
    compiled = (
        jax.jit(functools.partial(cast, fmt=Format(4, 3)))
        .lower(jax.ShapeDtypeStruct((1 << 20,), jnp.float32))
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 12
    assert compiled.cost_analysis()["bytes accessed"] == 2 * 4 * (1 << 20)


ALL = [  # up to 16 bits
    Format(exponent_bits, mantissa_bits)
    for exponent_bits in range(1, 9)
    for mantissa_bits in range(16 - exponent_bits)
]
SHORT = [*(fmt for fmt, _ in NAMED.values()), Format(3, 0), Format(1, 1), Format(8, 0)]


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(codes: jax.Array, fmt: Format) -> tuple[jax.Array, ...]:
    values = decode(codes, fmt)
    size = group_size(fmt.bits)
    filled = jnp.pad(codes, (0, -codes.size % size)).reshape(size, -1)
    again = unpack(pack(filled, fmt.bits), fmt.bits).ravel()
    return values, encode(values, fmt), again[: codes.size], cast(values, fmt)


@pytest.mark.parametrize("fmt", some(ALL, SHORT), ids=str)
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
    # The cast does not change values of the format, but turns subnormal float32 numbers into 0.
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(rounded, np.where(tiny, 0, values))


@pytest.mark.parametrize("name", NAMED)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    fmt, dtype = NAMED[name][0], np.dtype(NAMED[name][1])
    codes = np.arange(2**fmt.bits, dtype=np.uint32)
    stored = codes.astype(f"uint{8 * dtype.itemsize}").view(dtype)
    np.testing.assert_array_equal(decode(codes, fmt), stored.astype(np.float32))


def test_values_without_a_code_of_their_own() -> None:
    fmt = Format(4, 3)
    values = cast(jnp.float32([255, -255, np.inf]), fmt)
    np.testing.assert_array_equal(values, [256, -256, np.inf])
    np.testing.assert_array_equal(decode(encode(values, fmt), fmt), [np.inf, -np.inf, np.inf])
    four = Format(3, 0)
    assert decode(encode(jnp.float32(np.nan), four), four) == np.inf


def test_nan_stays_nan_whatever_its_payload() -> None:
    quiet = np.uint32([0x7F800001, 0x7FC00000, 0xFFFFFFFF]).view(np.float32)
    for fmt in (Format(5, 2), Format(4, 3), Format(8, 7)):
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
    """The first code of a column is in the lowest bits; the seventh code of 5 bits spans two words."""
    [[a, b]] = np.asarray(pack(jnp.arange(1, 9, dtype=jnp.uint32).reshape(4, 2), 8))
    assert (a, b) == (0x07050301, 0x08060402)
    [[a]] = np.asarray(pack(jnp.arange(8, dtype=jnp.uint32)[:, None], 4))
    assert a == 0x76543210
    codes = np.uint32([1, 0, 0, 0, 0, 0, 31, *[0] * 25])[:, None]  # the seventh begins at bit 30
    words = np.asarray(pack(jnp.asarray(codes), 5))[:, 0]
    np.testing.assert_array_equal(words, [0xC0000001, 7, 0, 0, 0])


E4M3 = Format(4, 3)


def rounded(x: np.ndarray) -> np.ndarray:
    return np.float32(x).astype(ml_dtypes.float8_e4m3).astype(np.float32)


def kahan(terms: np.ndarray) -> np.ndarray:
    total, error = np.zeros_like(terms[0]), np.zeros_like(terms[0])
    for term in terms:
        value = rounded(term - error)
        new = rounded(total + value)
        total, error = new, rounded(rounded(new - total) - value)
    return total


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_sums(count: int) -> None:
    terms = np.random.default_rng(count).normal(size=(count, 50)).astype(np.float32)
    total = np.zeros(50, np.float32)
    for term in terms:
        total = rounded(total + term)
    np.testing.assert_array_equal(sequential_sum(terms, E4M3), total)
    np.testing.assert_array_equal(kahan_sum(terms, E4M3), kahan(terms))


def test_kahan_keeps_what_the_plain_sum_loses() -> None:
    """With a 3-bit mantissa 16 + 0.5 rounds to 16, so the plain sum loses all 32 terms of 0.5."""
    terms = np.float32([16] + [0.5] * 32)[:, None]
    assert sequential_sum(terms, E4M3) == 16
    assert kahan_sum(terms, E4M3) == 32


def test_terms_may_be_codes() -> None:
    terms = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    values = rounded(terms)
    codes = encode(values, E4M3)
    np.testing.assert_array_equal(
        sequential_sum(codes, E4M3, lambda row: decode(row, E4M3)), sequential_sum(values, E4M3)
    )
