"""Tests modules defined by regular expressions, and the accuracy of cosines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.optim import modules


@pytest.mark.parametrize(
    "patterns, message",
    [
        ("body", "modules='body' must be a non-empty list of regular expressions"),
        ([], r"modules=\[\] must be a non-empty list"),
        (["("], "modules has '\\(', which is not a valid regular"),
        ([3], "modules has 3, which is not a valid regular"),
        (["a", "a"], "has 'a' twice"),
        (["^body"], "no module matches the parameter 'head'"),
        (["", "^head"], "the module '\\^head' has no parameters, because it matches none, or"),
    ],
)
def test_errors(patterns, message) -> None:
    with pytest.raises(ValueError, match=message):
        modules.assign({"body": jnp.ones(2), "head": jnp.ones(2)}, patterns)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e15])
@pytest.mark.parametrize("length", [1.0, 1.5, 300.0])
@pytest.mark.parametrize("angle", [0.0, 1e-4, 1e-2, 1.0, 1.5, 3.0])
def test_one_minus_cosine(angle: float, length: float, scale: float) -> None:
    """If two vectors have equal norms, 1 - cosine loses no digits even if it is tiny."""
    rng = np.random.default_rng(0)
    u, v = np.linalg.qr(rng.normal(size=(64, 2)))[0].T
    a = (scale * u).astype(np.float32)
    b = (scale * length * (np.cos(angle) * u + np.sin(angle) * v)).astype(np.float32)
    x, y = a.astype(np.float64), b.astype(np.float64)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    exact = np.sum((x - y) ** 2) / 2
    actual = float(modules.one_minus_cosine(modules.products({"w": a}, {"w": b}))[0])
    assert actual == pytest.approx(exact, rel=1e-3 if length < 2 else 0, abs=3e-7)
    if length == 1.0 and angle >= 1e-2:
        assert actual == pytest.approx(exact, rel=2e-3 if angle == 1e-2 else 1e-6)


def test_sums_add_up_over_shards() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2))
    full = modules.products({"w": a}, {"w": b})
    parts = [modules.products({"w": a[s]}, {"w": b[s]}) for s in (slice(3), slice(3, None))]
    for actual, expected in zip(jax.tree.map(jnp.add, *parts), full, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
