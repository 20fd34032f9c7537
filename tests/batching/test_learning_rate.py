"""Tests the learning rate's factor for a batch size, applied in full or in part."""

import pytest

from lamb_tpu.batching.learning_rate import rate_factor


@pytest.mark.parametrize(
    "rule, adjust, expected",
    [
        ("identity", 1.0, 1.0),
        ("linear", 1.0, 0.25),
        ("sqrt", 1.0, 0.5),
        ("sqrt", 0.5, 0.75),
        ("linear", 0.0, 1.0),
    ],
)
def test_factors(rule: str, adjust: float, expected: float) -> None:
    assert rate_factor(rule, 256, 64, adjust) == expected
    assert rate_factor(rule, 256, 256, adjust) == 1.0


def test_errors() -> None:
    with pytest.raises(ValueError, match="rule='cubic' is unknown; use one of identity, linear"):
        rate_factor("cubic", 256, 64)
    with pytest.raises(ValueError, match="batch_size=0 must be above 0"):
        rate_factor("sqrt", 256, 0)
    with pytest.raises(ValueError, match="adjust_factor=-1 must be at least 0"):
        rate_factor("sqrt", 256, 64, -1)
