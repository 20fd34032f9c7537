"""Every exchange with leaves of odd shapes, and with values whose squares leave float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import EXCHANGES, Exchange
from tests.parallel.exchange import over
from tests.quick import jit

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in EXCHANGES},
    "onebit of all": {"per_leaf": False},
    "topk layerwise": {"layerwise": True, "ratio": 0.1},
    "dgc clipped": {"clip_norm": 1e30, "ratio": 0.1},
    "ef14 sign": {"compressor": "sign", "layerwise": True},
    "ef21 plus": {"plus": True, "ratio": 0.1, "layerwise": True},
    "ef21 momentum": {"momentum": 0.5},
}
# PowerSGD needs a matrix that is worth factors.
SHAPES = {"empty": (0, 4), "empty vector": (0,), "kernel": (12, 12), "narrow": (2, 3), "number": ()}
DTYPES = {"narrow": jnp.bfloat16}  # the others: float32


def made(form: str) -> Exchange:
    options, name = FORMS[form], form.split()[0]
    if name in ("powersgd", "lgreco"):
        options = {"rank": 1, **options}
    found: Exchange = EXCHANGES[name](over.AXES, 2, **options)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_sums_scale_with_the_gradient(form: str) -> None:
    """An exchange of a power of two times a gradient gives that power of two times the sums."""
    exchange, rng = made(form), np.random.default_rng(0)
    grads = {
        name: jnp.asarray(rng.normal(size=(2, *shape)), DTYPES.get(name, jnp.float32))
        for name, shape in SHAPES.items()
    }
    params = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)
    step = jit(jax.vmap(exchange.reduce, axis_name=over.AXES[0]))
    sums = []
    # About 1, 1e19 and 1e-19: the squares of the others are not within float32.
    for factor in (1.0, 2.0**63, 2.0**-64):
        residual = over.start(exchange, params)
        scaled = jax.tree.map(lambda g, factor=factor: g * jnp.asarray(factor, g.dtype), grads)
        for _ in range(2):
            found, residual = step(scaled, residual)
        assert {name: leaf.shape[1:] for name, leaf in found.items()} == SHAPES
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in found.values())
        sums.append(jax.tree.map(lambda x, factor=factor: np.float64(x[0]) / factor, found))
    for found in sums:
        for name, leaf in found.items():
            np.testing.assert_allclose(leaf, sums[0][name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert np.any(sums[0]["kernel"] != 0)


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_and_a_skip_keep_the_structure(form: str) -> None:
    exchange = made(form)
    residual = exchange.init(
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    )
    for found in (exchange.reset(residual), exchange.skipped(residual, residual)):
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, residual)


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_without_leaves(form: str) -> None:
    if form.split()[0] in ("powersgd", "lgreco"):
        with pytest.raises(ValueError, match="rank is 1, but the model has no matrix"):
            made(form).init({})
        return
    residual = over.start(made(form), {})
    assert jax.vmap(made(form).reduce, axis_name=over.AXES[0], axis_size=2)({}, residual)[0] == {}
