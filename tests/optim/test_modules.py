"""Modules by regular expressions, and cosines with all their digits."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.optim import modules


def test_docstrings() -> None:
    result = doctest.testmod(modules)
    assert result.failed == 0 and result.attempted >= 1


@pytest.mark.parametrize(
    "patterns, message",
    [
        ("body", "modules must be a list of regular expressions over paths, not 'body'"),
        ([], "modules must be a list"),
        (["("], "modules must be valid regular expressions; '\\(' is none"),
        ([3], "modules must be valid regular expressions; 3 is none"),
        (["a", "a"], "has 'a' twice"),
        (["^body"], "no module matches the parameter 'head'"),
        (["", "^head"], "the module '\\^head' has no parameter that those before it leave"),
    ],
)
def test_mistakes(patterns, message) -> None:
    with pytest.raises(ValueError, match=message):
        modules.assign({"body": jnp.ones(2), "head": jnp.ones(2)}, patterns)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e15])
@pytest.mark.parametrize("length", [1.0, 1.5, 300.0])
@pytest.mark.parametrize("angle", [0.0, 1e-4, 1e-2, 1.0, 1.5, 3.0])
def test_one_minus_cosine(angle: float, length: float, scale: float) -> None:
    """Two vectors of one length keep their digits where 1 - cosine is tiny."""
    rng = np.random.default_rng(0)
    u, v = np.linalg.qr(rng.normal(size=(64, 2)))[0].T
    a = (scale * u).astype(np.float32)
    b = (scale * length * (np.cos(angle) * u + np.sin(angle) * v)).astype(np.float32)
    x, y = a.astype(np.float64), b.astype(np.float64)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    exact = np.sum((x - y) ** 2) / 2
    found = float(modules.one_minus_cosine(modules.products({"w": a}, {"w": b}))[0])
    assert found == pytest.approx(exact, rel=1e-3 if length < 2 else 0, abs=3e-7)
    if length == 1.0 and angle >= 1e-2:
        assert found == pytest.approx(exact, rel=2e-3 if angle == 1e-2 else 1e-6)


def test_sums_add_up_over_parts_of_tensors() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2))
    whole = modules.products({"w": a}, {"w": b})
    parts = [modules.products({"w": a[s]}, {"w": b[s]}) for s in (slice(3), slice(3, None))]
    for found, expected in zip(jax.tree.map(jnp.add, *parts), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
