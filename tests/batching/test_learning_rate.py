"""The rate follows the batch, in full or by a part."""

import doctest
import math

import jax
import pytest

from lamb_tpu.batching import learning_rate
from lamb_tpu.batching.learning_rate import given_rate, rate_factor, rate_given


def test_docstrings() -> None:
    result = doctest.testmod(learning_rate)
    assert result.failed == 0 and result.attempted >= 1


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


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="rule 'cubic' is unknown; known: identity, linear, sqrt"):
        rate_factor("cubic", 256, 64)
    with pytest.raises(ValueError, match="batch_size must be above 0, not 0"):
        rate_factor("sqrt", 256, 0)
    with pytest.raises(ValueError, match="adjust_factor must be at least 0, not -1"):
        rate_factor("sqrt", 256, 64, -1)


def test_a_rate_from_outside_is_an_argument_of_the_traced_update() -> None:
    traced = []

    @jax.jit
    def rate(count: jax.Array, value: jax.Array) -> jax.Array:
        traced.append(count)
        with given_rate(value):
            return rate_given(count)

    assert [float(rate(count, value)) for count, value in [(0, 0.5), (1, 0.25)]] == [0.5, 0.25]
    assert len(traced) == 1
    with given_rate(1.0), given_rate(2.0):
        assert float(rate_given(3)) == 2.0
    assert math.isnan(rate_given(3))
