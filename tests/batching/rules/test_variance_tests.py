"""Tests the norm test, the inner-product test and the augmented test."""

import pytest

from lamb_tpu.batching.rules import Augmented, InnerProductTest, NormTest


def test_the_norm_test_never_shrinks_and_rounds_up() -> None:
    rule = NormTest(granularity=8, upper=1024, eta=0.5)
    batches = [rule.next_batch(64, {"variance": v, "grad_sq": 2.0}, 0) for v in (1, 32, 33, 1e6)]
    assert batches == [64, 64, 72, 1024]


def test_inner_products_never_shrink_the_batch_and_do_not_depend_on_the_gradients_scale() -> None:
    rule = InnerProductTest(granularity=8, upper=1024, theta=0.5)
    for scale in (1.0, 7.0):
        batches = [
            rule.next_batch(
                64, {"inner_product_variance": v * scale**4, "grad_sq": 2.0 * scale**2}, 0
            )
            for v in (1, 64, 65, 1e6)
        ]
        assert batches == [64, 64, 72, 1024]


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
    rule = Augmented(granularity=8, upper=1024, theta=0.5, nu=2.0)
    statistics = {
        "inner_product_variance": inner,
        "orthogonal_variance": orthogonal,
        "grad_sq": 2.0,
    }
    assert rule.next_batch(64, statistics, 0) == expected


@pytest.mark.parametrize(
    "rule, thresholds, message",
    [
        (NormTest, {"eta": 0}, "eta=0 must be above 0"),
        (InnerProductTest, {"theta": -1}, "theta=-1 must be above 0"),
        (Augmented, {"theta": 0.5, "nu": 0}, "nu=0 must be above 0"),
    ],
)
def test_errors(rule, thresholds, message) -> None:
    with pytest.raises(ValueError, match=message):
        rule(granularity=8, upper=64, **thresholds)
