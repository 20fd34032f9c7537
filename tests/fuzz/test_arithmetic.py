"""NumPy's rules give what JAX's primitives give."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz import exact

X = np.float32(np.random.default_rng(0).uniform(0.1, 0.9, (3, 4)))
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "dot": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "batched dot": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "reductions": lambda x: (x.sum(1), x.max(0), x.min(), x.prod(1), x.argmax(1), (x > 0.5).any(0)),
    "shapes": lambda x: (x.T[None], x.reshape(2, 6), x[1:, ::2], jnp.flip(x, 1)),
    "functions": lambda x: (jnp.tanh(x), jax.nn.sigmoid(x), jnp.log1p(x), jax.scipy.special.erf(x)),
    "choices": lambda x: (jnp.where(x > 0.5, x, -x), jnp.clip(x, 0.3, 0.6), jnp.sign(x - 0.5)),
    "integers": lambda x: (jnp.int32(x * 10) // 3, jnp.int32(x * 10) % 3, jnp.arange(5) ** 2),
    "sums": lambda x: (jnp.cumsum(x, 1), jnp.cumsum(x[::-1], 0), jax.nn.logsumexp(x, 1)),
    "roots": lambda x: (x**-3, jnp.sqrt(x), jax.lax.rsqrt(x), jnp.exp2(x), x / 3),
    "scatter": lambda x: x.at[np.array([0, 2])].add(1.0),
    "gather": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rule(name: str) -> None:
    program = PROGRAMS[name]
    traced = jax.jit(program).trace(X)
    found = exact.evaluate(traced.jaxpr, 0.0, [X])
    for actual, wanted in zip(found, jax.tree.leaves(jax.jit(program)(X)), strict=True):
        assert actual.shape == wanted.shape
        assert (actual.dtype.kind == "f") == exact.is_float(wanted.dtype)
        if actual.dtype.kind != "f":
            assert actual.dtype == wanted.dtype
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)
