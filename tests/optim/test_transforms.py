"""Tests every transform with dtypes, jit, shardings, Optax's wrappers, NNX, and unusual trees."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim.sharding import state_sharding
from tests.marks import MAIN, some
from tests.optim.catalogue import PLAIN, TRANSFORMS
from tests.optim.runs import assert_shardings

RATE = optim.warmup(0.1, 10, 2)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float64": 1e-12}


def trees(dtype="float32"):
    """Returns parameters and gradients: a matrix, a vector and a scalar."""
    rng = np.random.default_rng(0)

    def tree():
        return {
            "dense": {
                "kernel": jnp.asarray(rng.standard_normal((4, 3)), dtype),
                "bias": jnp.asarray(rng.standard_normal(3), dtype),
            },
            "temperature": jnp.asarray(rng.standard_normal(), dtype),
        }

    return tree(), tree()


def types(tree):
    return jax.tree.map(lambda x: (x.dtype, x.shape), tree)


def assert_close(actual, expected, tolerance=1e-5):
    def close(a, b):
        a, b = np.float64(a), np.float64(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=0))

    jax.tree.map(close, actual, expected)


def finite(tree):
    return all(np.isfinite(np.float64(leaf)).all() for leaf in jax.tree.leaves(tree))


def run(tx, params, grads, steps=3):
    """Returns the updates and the state after `steps` steps with constant gradients and parameters."""
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
    assert update._cache_size() == 1
    return updates, state


@functools.cache
def alone(name, steps=3):
    """Returns the updates and the state of an unwrapped transform."""
    return run(PLAIN[name](RATE), *trees(), steps)


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(name, dtype, marks=() if name in MAIN else pytest.mark.long)
        for name, dtype in itertools.product(TRANSFORMS, TOLERANCE)
    ],
)
def test_dtypes_and_jit(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, grads = trees(dtype)
        tx = TRANSFORMS[name](RATE)
        updates, state = run(tx, params, grads)
        assert types(tx.init(params)) == types(state)
        wide = name.startswith("stochastic_rounding") and dtype == "bfloat16"
        assert types(updates) == types(jax.tree.map(jnp.float32, params) if wide else params)
        assert all(leaf.dtype.itemsize >= 4 for leaf in jax.tree.leaves(state))
        assert finite((updates, state))


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(
            name, dtype, marks=() if name in MAIN and dtype == "float32" else pytest.mark.long
        )
        for name, dtype in itertools.product(TRANSFORMS, TOLERANCE)
        if name in PLAIN or dtype == "float32"
    ],
)
def test_compiled_updates_equal_eager_ones(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, grads = trees(dtype)
        tx = TRANSFORMS[name](RATE)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
        actual = run(tx, params, grads)
        assert_close(actual, (updates, state), TOLERANCE[dtype])
        assert types(actual) == types((updates, state))


AMSGRAD = {"novograd amsgrad": functools.partial(optim.novograd, amsgrad=True)}


@pytest.mark.parametrize("name", some([*TRANSFORMS, *AMSGRAD], (*MAIN, *AMSGRAD)))
def test_weights_and_state_of_an_eager_init_can_be_donated(name):
    build = (TRANSFORMS | AMSGRAD)[name]
    params, grads = trees()
    tx = build(0.1)
    expected, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    step = jax.jit(tx.update, donate_argnums=(1, 2))
    updates, state = step(
        grads, tx.init(params), params
    )  # donation fails if the state contains an array twice
    assert_close(updates, expected)
    step(grads, state, trees()[0])


@pytest.mark.parametrize("name", some(PLAIN))
def test_shardings_stay_without_being_asked_to(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shardings = {
        "kernel": NamedSharding(mesh, PartitionSpec(None, "data")),
        "scale": NamedSharding(mesh, PartitionSpec()),
    }
    params = jax.device_put({"kernel": jnp.ones((4, 16)), "scale": jnp.ones(3)}, shardings)
    tx = PLAIN[name](0.1)
    state_shardings = state_sharding(tx, params, shardings)
    state = jax.jit(tx.init, out_shardings=state_shardings)(params)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params)
    assert update._cache_size() == 1
    assert_shardings((updates, state), (shardings, state_shardings))


@pytest.mark.parametrize("name", some(PLAIN))
def test_inside_chain(name):
    updates, _ = run(optax.chain(PLAIN[name](RATE), optax.scale(0.5)), *trees())
    assert_close(updates, jax.tree.map(lambda u: 0.5 * u, alone(name)[0]))


@pytest.mark.parametrize("name", some(PLAIN))
def test_inside_inject_hyperparams(name):
    static = [
        key
        for key, argument in inspect.signature(PLAIN[name]).parameters.items()
        if key != "learning_rate" and not isinstance(argument.default, float)
    ]
    tx = optax.inject_hyperparams(PLAIN[name], static_args=static)(learning_rate=RATE)
    updates, state = run(tx, *trees())
    assert_close(updates, alone(name)[0], 2e-5)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], RATE(2))


@pytest.mark.parametrize("name", some(PLAIN))
def test_inside_partition(name):
    params, grads = trees()
    labels = {"dense": {"kernel": "ours", "bias": "ours"}, "temperature": "other"}
    tx = optax.partition({"ours": PLAIN[name](RATE), "other": optax.sgd(0.1)}, labels)
    updates, _ = run(tx, params, grads)
    expected, _ = run(PLAIN[name](RATE), params["dense"], grads["dense"])
    assert_close(updates["dense"], expected)
    assert_close(updates["temperature"], -0.1 * grads["temperature"])


@pytest.mark.parametrize("name", some(PLAIN))
def test_inside_multi_steps(name):
    params, grads = trees()
    tx = optax.MultiSteps(PLAIN[name](RATE), every_k_schedule=2)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        for scale in (0.5, 1.5):  # their mean is 1
            updates, state = update(jax.tree.map(lambda g: scale * g, grads), state, params)
    assert update._cache_size() == 1
    assert_close((updates, state.inner_opt_state), alone(name, steps=2), 2e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_with_nnx(name):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, PLAIN[name](0.1), wrt=nnx.Param)
    values = {"kernel": model.kernel[...], "bias": model.bias[...]}
    grads = {"kernel": jnp.full((4, 3), 0.5), "bias": jnp.ones(3)}
    tx = PLAIN[name](0.1)
    state = tx.init(values)
    for _ in range(2):
        params = nnx.state(model, nnx.Param)
        optimizer.update(
            model,
            jax.tree.unflatten(
                jax.tree.structure(params),
                [grads[path[0].key] for path, _ in jax.tree_util.tree_leaves_with_path(params)],
            ),
        )
        updates, state = tx.update(grads, state, values)
        values = optax.apply_updates(values, updates)
    assert_close({"kernel": model.kernel[...], "bias": model.bias[...]}, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_strict_promotion(name, dtype):
    params, grads = trees(dtype)
    extra = {"halves": (grads, grads)} if name == "agvm(lamb)" else {}
    with jax.numpy_dtype_promotion("strict"):
        tx = TRANSFORMS[name](RATE)
        state = jax.eval_shape(tx.init, params)
        # Under jit, a transform with stages traces each stage.
        updates, after = jax.eval_shape(tx.update, grads, state, params, **extra)
    assert types(after) == types(state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_zeros(name):
    params, grads = trees()
    zeros, tx = jax.tree.map(jnp.zeros_like, params), TRANSFORMS[name](0.1)
    for weights, slopes in ((zeros, grads), (params, zeros), (zeros, zeros)):
        state = tx.init(weights)
        for _ in range(2):
            updates, state = tx.update(slopes, state, weights)
            assert finite((updates, state))
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_gradient_that_is_not_a_number_shows(name):
    params, grads = trees()
    tx = TRANSFORMS[name](0.1)
    grads["dense"]["kernel"] = grads["dense"]["kernel"].at[1, 2].set(jnp.nan)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert jnp.isnan(updates["dense"]["kernel"][1, 2])
    others = jax.tree.leaves((updates["dense"]["bias"], updates["temperature"]))
    if has_a_norm_of_all_gradients(name):
        assert all(jnp.isnan(leaf).all() for leaf in others)  # NaN affects all leaves
    else:
        assert finite(others)


def has_a_norm_of_all_gradients(name):
    preset = getattr(TRANSFORMS[name], "keywords", {})
    return name.startswith(("adagrad_norm", "clip_global_norm")) or "clip_global_norm" in preset


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_bare_scalar_and_trees_without_leaves(name):
    tx, leaf = TRANSFORMS[name](0.1), jnp.float32(2.0)
    updates, _ = tx.update(leaf, tx.init(leaf), leaf)
    assert updates.shape == () and updates < 0
    for empty in ({}, {"nothing": None}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert updates == empty
