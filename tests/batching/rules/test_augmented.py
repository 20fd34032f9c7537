"""The augmented inner-product test."""

import doctest

import pytest

from lamb_tpu.batching.rules import Augmented, augmented


def test_docstrings() -> None:
    result = doctest.testmod(augmented)
    assert result.failed == 0 and result.attempted >= 2


@pytest.mark.parametrize(
    "inner, orthogonal, expected",
    [
        (0.0, 0.0, 64),
        (65.0, 0.0, 72),
        (0.0, 650.0, 88),
        (90.0, 650.0, 96),
        (float("nan"), 650.0, 88),
    ],
)
def test_the_larger_of_both_tests_decides(inner, orthogonal, expected) -> None:
    rule = Augmented(quantum=8, upper=1024, theta=0.5, nu=2.0)
    statistics = {
        "inner_product_variance": inner,
        "orthogonal_variance": orthogonal,
        "grad_sq": 2.0,
    }
    assert rule.next_batch(64, statistics, 0) == expected


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="nu must be above 0, not 0"):
        Augmented(quantum=8, upper=64, theta=0.5, nu=0)
