"""Compares the core of attention with the plain formula and its automatic derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.kernels.attention import attend

ROWS, LENGTH, HEADS, WIDTH = 3, 10, 2, 6
MASK = np.arange(LENGTH) < np.array([10, 4, 0])[:, None]  # one example is only padding
KEEP = np.random.default_rng(1).random((ROWS, HEADS, LENGTH, LENGTH)) >= 0.3


def inputs(dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(ROWS, LENGTH, HEADS, WIDTH)), dtype) for _ in range(3)]


def plain(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, keep: Any, rate: float
) -> jax.Array:
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) / WIDTH**0.5
    scores += jnp.where(mask, 0, -1e30)[:, None, None]
    probabilities = jax.nn.softmax(scores)
    if keep is not None:
        probabilities = jnp.where(keep, probabilities / (1 - rate), 0)
    return jnp.einsum("bnqk,bknh->bqnh", probabilities, value)


def value_and_grads(function: Any, arrays: list[jax.Array], keep: Any) -> Any:
    rate = 0.0 if keep is None else 0.3

    def total(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = function(*arrays, MASK, keep, rate)
        return jnp.sum(jnp.sin(3 * mixed.astype(jnp.float32))), mixed

    grads, mixed = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arrays)
    return [mixed, *grads]


@pytest.mark.parametrize("keep", [None, KEEP], ids=["whole", "dropped"])
def test_values_and_gradients_are_those_of_the_formula(keep: Any) -> None:
    arrays = inputs(jnp.float32)
    actual, expected = (value_and_grads(function, arrays, keep) for function in (attend, plain))
    for ours, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5)
        assert np.abs(right).max() > 0.1
    # Nothing attends to padding, unless there is only padding.
    for grad in actual[2:]:
        assert not np.any(grad[1, 4:]) and np.all(np.isfinite(grad))


@pytest.mark.parametrize("keep", [None, KEEP], ids=["whole", "dropped"])
def test_bfloat16_is_near(keep: Any) -> None:
    arrays = inputs(jnp.bfloat16)
    expected = value_and_grads(plain, [x.astype(jnp.float32) for x in arrays], keep)
    for actual, right in zip(value_and_grads(attend, arrays, keep), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        error = np.abs(actual.astype(jnp.float32) - right).max()
        assert error < 0.03 * np.abs(right).max()


def test_large_scores_overflow_nothing() -> None:
    query, key, value = inputs(jnp.float32)
    for actual, right in zip(
        value_and_grads(attend, [100 * query, 100 * key, value], KEEP),
        value_and_grads(plain, [100 * query, 100 * key, value], KEEP),
        strict=True,
    ):
        np.testing.assert_allclose(actual, right, rtol=1e-3, atol=2e-3)


def test_one_array_of_scores_is_saved() -> None:
    arrays = inputs(jnp.bfloat16)
    _, pull = jax.vjp(lambda *arrays: attend(*arrays, MASK, KEEP, 0.3), *arrays)
    sizes = [(leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(pull)]
    assert sizes.count((ROWS * HEADS * LENGTH**2, "bfloat16")) == 1
    # The signs of the weights store the mask.
    assert [size for size, _ in sizes].count(ROWS * HEADS * LENGTH**2) == 1
