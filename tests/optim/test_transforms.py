"""Every transform through dtypes, jit, Optax's wrappers, and trees that are odd."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim.factory import OPTIMIZERS

TRANSFORMS = {
    **OPTIMIZERS,
    "lamb collecting": functools.partial(optim.lamb, collect=True),
    "scale_by_trust_ratio": lambda rate: optax.chain(
        optim.scale_by_trust_ratio(collect=True), optax.scale_by_learning_rate(rate)
    ),
}
RATE = optim.warmup(0.1, 10, 2)


def _trees(dtype):
    rng = np.random.default_rng(0)

    def tree():
        return {
            "dense": {"kernel": jnp.asarray(rng.standard_normal((4, 3)), dtype),
                      "bias": jnp.asarray(rng.standard_normal(3), dtype)},
            "temperature": jnp.asarray(rng.standard_normal(), dtype),
        }

    return tree(), tree()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_dtypes_jit_and_no_recompilation(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, grads = _trees(dtype)
        tx = TRANSFORMS[name](RATE)
        jitted, eager_state, state = jax.jit(tx.update), tx.init(params), tx.init(params)
        for _ in range(3):
            eager, eager_state = tx.update(grads, eager_state, params)
            updates, state = jitted(grads, state, params)
            jax.tree.map(lambda u, p: _same(u.dtype, p.dtype), updates, params)
            tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float64": 1e-12}[dtype]
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(
                    np.float64(a), np.float64(b), rtol=tolerance, atol=1e-30),
                updates, eager,
            )
        assert jitted._cache_size() == 1
        narrow = [leaf.dtype for leaf in jax.tree.leaves(state)
                  if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4]
        assert not narrow
        jax.tree.map(lambda a, b: _same((a.dtype, a.shape), (b.dtype, b.shape)),
                     state, tx.init(params))


def _same(found, expected):
    assert found == expected


@pytest.mark.parametrize("name", TRANSFORMS)
def test_trees_without_leaves_and_bare_leaves(name):
    tx = TRANSFORMS[name](0.1)
    updates, _ = tx.update({}, tx.init({}), {})
    assert updates == {}
    leaf = jnp.float32(2.0)
    updates, _ = tx.update(leaf, tx.init(leaf), leaf)
    assert updates.shape == () and np.isfinite(updates)


@pytest.mark.parametrize("name", ["lamb", "lars", "lars_lamb_paper", "adamw"])
def test_multi_steps_equals_the_mean_gradient(name):
    params, grads = _trees("float32")
    wrapped = optax.MultiSteps(TRANSFORMS[name](RATE), every_k_schedule=2)
    plain = TRANSFORMS[name](RATE)
    state, expected_state = wrapped.init(params), plain.init(params)
    update = jax.jit(wrapped.update)
    for _ in range(2):
        for scale in (0.5, 1.5):
            micro = jax.tree.map(lambda g, scale=scale: scale * g, grads)
            updates, state = update(micro, state, params)
        expected, expected_state = plain.update(grads, expected_state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), updates, expected)


@pytest.mark.parametrize("name", ["lamb", "lars", "lars_lamb_paper"])
def test_inject_hyperparams(name):
    params, grads = _trees("float32")
    injected = optax.inject_hyperparams(TRANSFORMS[name])(learning_rate=RATE, weight_decay=0.02)
    plain = TRANSFORMS[name](RATE, weight_decay=0.02)
    state, expected_state = injected.init(params), plain.init(params)
    update = jax.jit(injected.update)
    for _ in range(3):
        updates, state = update(grads, state, params)
        expected, expected_state = plain.update(grads, expected_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), updates, expected)
    assert update._cache_size() == 1
    np.testing.assert_allclose(state.hyperparams["learning_rate"], RATE(2))


@pytest.mark.parametrize("name", ["lamb collecting", "lars", "adamw"])
def test_init_under_jit_takes_shardings(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put({"kernel": jnp.ones((16, 4))}, split)
    tx = TRANSFORMS[name](0.1)
    shardings = jax.tree.map(
        lambda leaf: split if leaf.ndim == 2 else replicated,
        jax.eval_shape(tx.init, params),
    )
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    update = jax.jit(tx.update, out_shardings=({"kernel": split}, shardings))
    for _ in range(2):
        updates, state = update(params, state, params)
    assert update._cache_size() == 1
    jax.tree.map(lambda leaf, sharding: _same(leaf.sharding, sharding), state, shardings)


def test_masked_and_partitioned_trees():
    params, grads = _trees("float32")
    tx = optax.partition(
        {"layerwise": optim.lamb(0.1), "plain": optax.sgd(0.1)},
        {"dense": {"kernel": "layerwise", "bias": "plain"}, "temperature": "plain"},
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    alone = optim.lamb(0.1)
    expected, _ = alone.update(
        grads["dense"]["kernel"], alone.init(params["dense"]["kernel"]), params["dense"]["kernel"]
    )
    np.testing.assert_allclose(updates["dense"]["kernel"], expected, rtol=1e-5)
    np.testing.assert_allclose(updates["dense"]["bias"], -0.1 * grads["dense"]["bias"], rtol=1e-6)
