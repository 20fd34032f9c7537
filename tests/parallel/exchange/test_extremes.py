"""Tests every exchange with unusual shapes, and with values that overflow or underflow when squared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange import EXCHANGES, Exchange
from tests.parallel.exchange import over
from tests.raising import rejected

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in EXCHANGES},
    "onebit of all": {"per_leaf": False},
    "topk layerwise": {"layerwise": True, "ratio": 0.1},
    "dgc clipped": {"clip_norm": 1e30, "ratio": 0.1},
    "ef14 sign": {"compressor": "sign", "layerwise": True},
    "ef21 plus": {"plus": True, "ratio": 0.1, "layerwise": True},
    "ef21 momentum": {"momentum": 0.5},
}
# PowerSGD needs a matrix that is large enough to be sent as factors: `kernel`.
SHAPES = {"empty": (0, 4), "empty vector": (0,), "kernel": (12, 12), "narrow": (2, 3), "number": ()}
DTYPES = {"narrow": jnp.bfloat16}  # all other leaves are float32


def made(form: str) -> Exchange:
    options, name = FORMS[form], form.split()[0]
    if name in ("powersgd", "lgreco"):
        options = {"rank": 1, **options}
    actual: Exchange = EXCHANGES[name](over.AXES, 2, **options)
    return actual


@pytest.mark.parametrize("form", FORMS)
def test_sums_scale_with_the_gradient(form: str) -> None:
    """A gradient times a power of two gives the sums times that power of two."""
    exchange, rng = made(form), np.random.default_rng(0)
    grads = {
        name: jnp.asarray(rng.normal(size=(2, *shape)), DTYPES.get(name, jnp.float32))
        for name, shape in SHAPES.items()
    }
    params = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)
    step = jax.jit(jax.vmap(exchange.reduce, axis_name=over.AXES[0]))
    sums = []
    # With the last two factors values are about 1e19 and 1e-19, and their squares overflow or
    # underflow in float32.
    for factor in (1.0, 2.0**63, 2.0**-64):
        residual = over.start(exchange, params)
        scaled = jax.tree.map(lambda g, factor=factor: g * jnp.asarray(factor, g.dtype), grads)
        for _ in range(2):
            actual, residual = step(scaled, residual)
        assert {name: leaf.shape[1:] for name, leaf in actual.items()} == SHAPES
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in actual.values())
        sums.append(jax.tree.map(lambda x, factor=factor: np.float64(x[0]) / factor, actual))
    for actual in sums:
        for name, leaf in actual.items():
            np.testing.assert_allclose(leaf, sums[0][name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert np.any(sums[0]["kernel"] != 0)


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_and_a_skip_keep_the_structure(form: str) -> None:
    exchange = made(form)
    residual = exchange.init(
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    )
    for actual in (exchange.reset(residual), exchange.skipped(residual, residual)):
        assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, residual)


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_without_leaves(form: str) -> None:
    if form.split()[0] in ("powersgd", "lgreco"):
        with rejected("rank", 1, "needs a matrix", kind=ArgumentError):
            made(form).init({})
        return
    residual = over.start(made(form), {})
    assert jax.vmap(made(form).reduce, axis_name=over.AXES[0], axis_size=2)({}, residual)[0] == {}
