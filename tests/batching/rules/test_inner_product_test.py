"""The inner-product test."""

import doctest

import pytest

from lamb_tpu.batching.rules import InnerProductTest, inner_product_test


def test_docstrings() -> None:
    result = doctest.testmod(inner_product_test)
    assert result.failed == 0 and result.attempted >= 2


def test_it_never_shrinks_and_does_not_depend_on_the_gradients_scale() -> None:
    rule = InnerProductTest(quantum=8, upper=1024, theta=0.5)
    for scale in (1.0, 7.0):
        batches = [
            rule.next_batch(
                64, {"inner_product_variance": v * scale**4, "grad_sq": 2.0 * scale**2}, 0
            )
            for v in (1, 64, 65, 1e6)
        ]
        assert batches == [64, 64, 72, 1024]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="theta must be above 0, not -1"):
        InnerProductTest(quantum=8, upper=64, theta=-1)
