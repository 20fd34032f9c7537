"""Casts against ml_dtypes, against midpoints of neighbours, against CPD, and in expectation."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lamb_tpu.parallel.exchange.formats import E3M0, E4M3, E4M3FN, E5M2, Format, cast
from tests.parallel.exchange.formats.test_format import NAMED


def values_of(fmt: Format) -> np.ndarray:
    """All finite values that are not negative, ascending, from the definition alone."""
    found = []
    for stored in range(2**fmt.exponent_bits - fmt.reserved):
        for mantissa in range(2**fmt.mantissa_bits):
            significand = mantissa / 2**fmt.mantissa_bits + (stored > 0)
            found.append(significand * 2.0 ** (max(stored, 1) - fmt.bias))
    return np.float32(found if fmt.style != "fn" else found[:-1])


def bit_patterns() -> np.ndarray:
    """Float32 values of every exponent, with signs, infinities and NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # As many again with few bits set in the mantissa, where ties are.
    short = bits & np.uint32(0xFFF80000)
    return np.concatenate([bits, short, short + 1, short - 1]).view(np.float32)


@pytest.mark.parametrize("name", NAMED)
def test_as_ml_dtypes(name: str) -> None:
    x = bit_patterns()
    if NAMED[name].style == "finite":
        x = x[np.isfinite(x)]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.astype(getattr(ml_dtypes, name, name)).astype(np.float32)
    found = np.asarray(cast(x, NAMED[name]))
    np.testing.assert_array_equal(found, expected)
    known = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(found)[known], np.signbit(expected)[known])


@pytest.mark.parametrize("style", ["ieee", "fn", "finite"])
@pytest.mark.parametrize("fields", [(1, 3), (2, 1), (3, 2), (4, 3), (5, 2), (6, 5), (7, 1)])
def test_neighbours_and_ties(fields: tuple[int, int], style: str) -> None:
    fmt = Format(*fields, style)
    values = values_of(fmt)
    middles = (values[:-1] + values[1:]) / 2
    even = np.where(np.arange(len(middles)) % 2, values[1:], values[:-1])
    below, above = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))
    for sign in (1, -1):
        for x, expected in (
            (values, values),
            (below, values[:-1]),
            (middles, even),
            (above, values[1:]),
        ):
            np.testing.assert_array_equal(cast(sign * x, fmt), sign * expected)
    assert fmt.largest == values[-1]


@pytest.mark.parametrize("style", ["ieee", "finite", "cpd"])
def test_without_mantissa_bits_ties_round_up(style: str) -> None:
    x = np.float32([0.124, 0.125, 0.126, 0.374, 0.375, 0.75, 1.49, 1.5, 3, 6])
    expected = [0, 0, 0.25, 0.25, 0.5, 1, 1, 2, 4, 8]
    if style == "cpd":
        expected[2] = 0.25
    np.testing.assert_array_equal(cast(x, Format(3, 0, style)), expected)


def test_ends_of_the_styles() -> None:
    x = np.float32([240, 247.9, 248, 255, 256, -1e9, np.inf, np.nan, 1e-42, -1e-42])
    inf, nan = np.inf, np.nan
    expected = {
        Format(4, 3): [240, 240, inf, inf, inf, -inf, inf, nan, 0, -0.0],
        # By the kernel of CPD: what is below 2^8 is not too large before it is rounded.
        Format(4, 3, "cpd"): [240, 240, 256, 256, inf, -inf, inf, nan, 0, 0],
        E4M3FN: [240, 240, 256, 256, 256, nan, nan, nan, 0, -0.0],
        Format(4, 3, "finite"): [240, 240, 256, 256, 256, -480, 480, 0, 0, -0.0],
    }
    for fmt, values in expected.items():
        found = np.asarray(cast(x, fmt))
        np.testing.assert_array_equal(found, np.float32(values), err_msg=str(fmt))
        np.testing.assert_array_equal(np.signbit(found[8:]), np.signbit(values[8:]))


def test_cpd_loses_bits_below_the_normal_numbers() -> None:
    """Just above half of the smallest value of E5M2: it counts as a tie, and goes to zero."""
    x = np.nextafter(np.float32(2**-17), np.float32(1))
    assert cast(x, E5M2) == 2**-16 and cast(x, Format(5, 2, "cpd")) == 0


@pytest.mark.parametrize("fmt", [E3M0, E4M3, E4M3FN, Format(2, 3, "finite"), Format(8, 2)])
def test_at_random_the_expectation_is_the_value(fmt: Format) -> None:
    tries, steps = 4000, fmt.step if fmt.exponent_bits < 8 else 2.0**-20
    low = steps * np.float32([0.001, 0.3, 0.5, 0.9, 1.4])
    x = np.concatenate([low, -low, np.float32([0, 0.9, 1.0, 1.1, 1.7, 3.2, -5.3])])
    keys = jax.random.split(jax.random.key(0), tries)
    found = np.asarray(jax.jit(jax.vmap(lambda key: cast(jnp.asarray(x), fmt, key)))(keys))
    # Every result has a value of the format, one of the two neighbours.
    np.testing.assert_array_equal(found, cast(found, fmt))
    lower, upper = found.min(axis=0), found.max(axis=0)
    assert (lower <= x).all() and (x <= upper).all()
    # Five standard deviations of a mean of coins that differ by the distance.
    chance = np.where(upper > lower, (x - lower) / np.where(upper > lower, upper - lower, 1), 0)
    deviation = (upper - lower) * np.sqrt(chance * (1 - chance) / tries)
    assert (np.abs(found.mean(axis=0) - x) <= 5 * deviation).all()
    exact = np.asarray(cast(x, fmt)) == x
    assert (lower[exact] == upper[exact]).all() and exact.sum() >= 2 and (~exact).sum() > 8


def test_at_random_far_below_the_smallest_value() -> None:
    """2^-10 of a step is a step once in 1,024 times."""
    x = jnp.full(200_000, E5M2.step * 2.0**-10, jnp.float32)
    found = np.asarray(cast(x, E5M2, jax.random.key(1)))
    assert set(found) == {0, np.float32(E5M2.step)}
    assert abs((found > 0).sum() - 195) < 5 * 14


def test_at_random_too_large_is_infinite() -> None:
    x = jnp.full(1000, 250.0)
    assert set(np.asarray(cast(x, E4M3, jax.random.key(0)))) == {240, np.inf}


def test_one_pass_over_the_memory() -> None:
    """One fusion, without temporaries: the cast reads and writes every value once."""
    compiled = (
        jax.jit(functools.partial(cast, fmt=Format(4, 3, "cpd")))
        .lower(jax.ShapeDtypeStruct((1 << 20,), jnp.float32))
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 12
    assert compiled.cost_analysis()["bytes accessed"] == 2 * 4 * (1 << 20)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="x must be float32, not bfloat16"):
        cast(jnp.zeros(3, jnp.bfloat16), E4M3)
    with pytest.raises(ValueError, match="CPD rounds to nearest"):
        cast(jnp.zeros(3), Format(4, 3, "cpd"), jax.random.key(0))
