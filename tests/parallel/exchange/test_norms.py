"""Compares norms with float64, also for values whose squares overflow or underflow, and empty vectors."""

import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import norms


@pytest.mark.parametrize("factor", [2.0**100, 1.0, 2.0**-100])
def test_norms_of_any_size(factor: float) -> None:
    values = np.random.default_rng(1).normal(size=100).astype(np.float32)
    exact = np.linalg.norm(values.astype(np.float64))
    scaled = jnp.asarray(values * np.float32(factor))
    np.testing.assert_allclose(norms.l2([scaled[:30], scaled[30:]]), factor * exact, rtol=1e-6)
    np.testing.assert_allclose(norms.root_mean_square(scaled), factor * exact / 10, rtol=1e-6)


def test_in_range_the_bits_are_those_of_the_plain_formula() -> None:
    values = jnp.asarray(np.random.default_rng(2).normal(size=1000), jnp.float32)
    plain = jnp.sqrt(jnp.sum(values * values) / values.size)
    assert norms.root_mean_square(values) == plain


def test_no_values_and_values_that_are_not_finite() -> None:
    assert norms.root_mean_square(jnp.zeros(0)) == 0 == norms.l2([jnp.zeros(3), jnp.zeros(0)])
    for bad in (np.inf, np.nan):
        assert not np.isfinite(norms.root_mean_square(jnp.array([1.0, bad])))
        assert not np.isfinite(norms.l2([jnp.array([1.0, bad])]))


def test_powers_of_two_at_the_ends_of_float32() -> None:
    assert norms.power_of_two(jnp.float32(3.4e38)) == 2.0**127
    assert norms.power_of_two(jnp.float32(1.2e-38)) == 2.0**-126
