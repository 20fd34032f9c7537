"""Exact evaluation of traced programs: same random numbers, no rounding, and a model of rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fuzz import exact


def evaluated(function: Any, *arguments: Any, k: float = 0.0) -> Any:
    traced = jax.jit(function).trace(*arguments)
    flat = exact.evaluate(traced.jaxpr, k, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), flat)


def test_arithmetic_is_in_float64() -> None:
    x = np.float32([1e8, 1.0, -1e8])
    assert float(jax.jit(jnp.sum)(x)) == 0.0
    found = evaluated(jnp.sum, x)
    assert found.dtype == np.float64 and found == 1.0
    # Casts to narrower types round nothing.
    assert evaluated(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), np.float32(1.001)) == (
        pytest.approx(np.float32(1.001), rel=1e-15)
    )


def test_random_numbers_are_those_of_the_program() -> None:
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        key = jax.random.fold_in(key, 3)
        return jax.random.bernoulli(key, 0.3, (50,)), jax.random.uniform(key, (50,))

    key = jax.random.key(5)
    for wanted, found in zip(draw(key), evaluated(draw, key)):
        np.testing.assert_array_equal(found, wanted)
    # They have no rounding errors.
    for wanted, found in zip(draw(key), evaluated(draw, key, k=64.0)):
        np.testing.assert_array_equal(found, wanted)


def test_control_flow() -> None:
    def program(x: jax.Array) -> Any:
        total, rows = lax.scan(lambda c, row: (c + row, c * row), x[0], x, reverse=True)
        count = lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, total))
        chosen = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, total)
        return total, rows, count, chosen, jax.grad(lambda x: jnp.sum(x**3))(x)

    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    for wanted, found in zip(
        jax.tree.leaves(jax.jit(program)(x)), jax.tree.leaves(evaluated(program, x))
    ):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_errors_have_the_size_of_the_dtype(dtype: Any) -> None:
    def program(x: jax.Array) -> jax.Array:
        y = x.astype(dtype)
        return (y * y + y).astype(jnp.float32)

    x = np.float32(np.random.default_rng(0).uniform(1, 2, 400))
    expected, actual = evaluated(program, x), np.asarray(jax.jit(program)(x), np.float64)
    spread = np.linalg.norm(evaluated(program, x, k=1.0) - expected)
    assert 0.02 < np.linalg.norm(actual - expected) / spread < 2
    doubled = np.linalg.norm(evaluated(program, x, k=2.0) - expected)
    assert 1.7 < doubled / spread < 2.3


def test_an_unknown_call_is_an_error() -> None:
    def program(x: jax.Array) -> jax.Array:
        return lax.reduce(x, np.float32(0), lambda a, b: a * 2 + b, (0,))

    with pytest.raises(NotImplementedError, match="reduce"):
        evaluated(program, np.ones(3, np.float32))
