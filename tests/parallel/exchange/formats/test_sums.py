"""Sums and products that round after each operation, against loops over scalars."""

import ml_dtypes
import numpy as np
import pytest

from lamb_tpu.parallel.exchange.formats import (
    E4M3,
    E5M2,
    Format,
    decode,
    encode,
    kahan_sum,
    matmul,
    sequential_sum,
)


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
    """By hand, with 3 bits of a mantissa: 16 + 0.5 is 16 again, so 32 of them are lost."""
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


def test_product() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(5, 7)).astype(np.float32)
    b = rng.normal(size=(7, 3)).astype(np.float32)
    expected = [
        [kahan(rounded(a[row] * b[:, column])[:, None])[0] for column in range(3)]
        for row in range(5)
    ]
    np.testing.assert_array_equal(matmul(a, b, E4M3), expected)


def test_product_nears_the_exact_one_with_more_bits() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 16, 16)).astype(np.float32)
    errors = [np.abs(matmul(a, b, fmt) - a @ b).max() for fmt in (E5M2, E4M3, Format(5, 10))]
    assert errors[0] > errors[1] > errors[2] > 0 and errors[2] < 1e-2
