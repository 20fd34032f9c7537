"""Tests that max pooling as element-wise maxima and its gradient equal those of JAX's pooling."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.kernels.pooling import max_pool_2x2, max_pool_3x3

Pool = Callable[[jax.Array], jax.Array]


def windows_2x2(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (2, 2), (2, 2))


def windows_3x3(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))


@pytest.mark.parametrize(
    "ours, theirs, height, width",
    [
        (max_pool_2x2, windows_2x2, 4, 6),
        (max_pool_3x3, windows_3x3, 8, 6),
        (max_pool_3x3, windows_3x3, 7, 6),
        (max_pool_3x3, windows_3x3, 2, 3),
        (max_pool_3x3, windows_3x3, 1, 2),
        (max_pool_3x3, windows_3x3, 1, 1),
    ],
)
def test_values_and_gradients(ours: Pool, theirs: Pool, height: int, width: int) -> None:
    size = 3 * height * width * 2
    # No two values are equal.
    x = np.random.default_rng(0).permutation(size).reshape(3, height, width, 2).astype(np.float32)
    np.testing.assert_array_equal(ours(x), theirs(x))
    actual, expected = (
        jax.jit(jax.grad(lambda x, pool=pool: jnp.sum(pool(x) ** 2)))(x) for pool in (ours, theirs)
    )
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.long
@pytest.mark.parametrize("ours, theirs", [(max_pool_2x2, windows_2x2), (max_pool_3x3, windows_3x3)])
def test_zeros_of_a_relu_pass_no_gradient(ours: Pool, theirs: Pool) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 16)) - 1  # most windows contain only zeros
    actual, expected = (
        jax.grad(lambda x, pool=pool: jnp.sum(pool(nn.relu(x)) ** 2 + pool(nn.relu(x))))(x)
        for pool in (ours, theirs)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.long
def test_gradient_of_equal_pixels_is_that_of_pairs_of_maxima() -> None:
    """With few different values, most windows have several largest pixels."""
    x = jax.random.randint(jax.random.key(0), (2, 8, 6, 16), 0, 3).astype(jnp.float32)

    def pairs(x: jax.Array) -> jax.Array:
        x = jnp.maximum(x[:, 0::2], x[:, 1::2])
        return jnp.maximum(x[:, :, 0::2], x[:, :, 1::2])

    actual, expected = (
        jax.grad(lambda x, pool=pool: jnp.sum(jnp.sin(pool(x) + jnp.arange(16))))(x)
        for pool in (max_pool_2x2, pairs)
    )
    np.testing.assert_array_equal(actual, expected)
    half = jax.grad(lambda x: jnp.sum(max_pool_2x2(x)))(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16 and half.sum() == 2 * 4 * 3 * 16


def test_nan_stays() -> None:
    x = jnp.ones((1, 4, 4, 1)).at[0, 1, 1, 0].set(jnp.nan)
    assert jnp.isnan(max_pool_3x3(x)).sum() == 4 and jnp.isnan(max_pool_2x2(x)).sum() == 1


def test_programs_for_tpus_have_windows() -> None:
    lowered = jax.jit(max_pool_3x3).trace(jnp.ones((1, 4, 4, 1))).lower(lowering_platforms=("tpu",))
    assert "reduce_window" in lowered.as_text() and "concatenate" not in lowered.as_text()
