"""Tests complex leaves: norms and second moments use |z|^2, as in Optax and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import clipping, diagnostics, trust_ratio
from lamb_tpu.optim.parameters import ParameterMetadata
from tests.marks import some
from tests.optim.catalogue import PLAIN, takes
from tests.optim.runs import after

BUILDS = {
    **PLAIN,
    "lamb, gradient": functools.partial(optim.lamb, decay="gradient", nesterov="both"),
    "lamb, l1": functools.partial(optim.lamb, norm="l1", decay="decoupled", clip_global_norm=1.0),
    "lars, larc": functools.partial(optim.lars, **optim.preset("lars", "larc"), norm="linf"),
    "novograd, linf": functools.partial(optim.novograd, norm="linf", bias_correction=True),
    "rmsprop_tf, centered": functools.partial(optim.rmsprop_tf, centered=True, nesterov=True),
    "adagrad_norm, layers": functools.partial(optim.adagrad_norm, per_layer=True),
    "apollo, projecting": functools.partial(optim.apollo, rank=2, weight_decay=0.1),
}
RULES = [("stack", {"layer_axes": (0,)}), ("", {})]


def case(steps=3, dtype="complex128"):
    """Returns parameters and gradients that are complex, except for the leaf 'real'."""
    rng = np.random.default_rng(0)

    def tree():
        shapes = {"kernel": (4, 3), "stack": (2, 3, 4), "scalar": ()}
        leaves = {
            name: rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
            for name, shape in shapes.items()
        }
        real = rng.standard_normal(5).astype(np.zeros(0, dtype).real.dtype)
        return {name: np.asarray(leaf, dtype) for name, leaf in leaves.items()} | {"real": real}

    return tree(), [tree() for _ in range(steps)]


def assert_close(actual, expected, rtol=1e-12):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)

    jax.tree.map(close, actual, expected)


@pytest.mark.parametrize("norm, order", [("l1", 1), ("l2", 2), ("linf", np.inf)])
def test_norms_are_numpys(norm, order):
    expected = {1: 7.0, 2: 5.0, np.inf: 4.0}[order]
    actual = trust_ratio.leaf_norm(jnp.asarray([3j, 4.0]), ParameterMetadata(), norm)
    assert (actual.dtype, actual.item()) == (jnp.float32, expected)
    with jax.enable_x64(True):
        stack = case()[0]["stack"]
        actual = trust_ratio.leaf_norm(stack, ParameterMetadata(layer_axes=(0,)), norm)
        assert actual.dtype == jnp.float64
        np.testing.assert_allclose(
            actual.ravel(), [np.linalg.norm(layer.ravel(), order) for layer in stack], rtol=1e-14
        )
        leaves = [np.ravel(leaf) for leaf in case()[0].values()]
        np.testing.assert_allclose(
            clipping.global_norm(case()[0]), np.linalg.norm(np.concatenate(leaves)), rtol=1e-14
        )


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (lambda: optim.lamb(0.1, weight_decay=0.1), lambda: optax.lamb(0.1, weight_decay=0.1)),
        (lambda: optim.lars(0.1, **optim.preset("lars", "optax")), lambda: optax.lars(0.1)),
        (
            lambda: optim.rmsprop_tf(0.1, b2=0.8, momentum=0.7, eps=0.01, lr_in_momentum=False),
            lambda: optax.rmsprop(0.1, 0.8, eps=0.01, initial_scale=1.0, momentum=0.7),
        ),
        (
            lambda: optim.rmsprop_tf(0.1, b2=0.8, momentum=0.0, eps=0.01, centered=True),
            lambda: optax.rmsprop(0.1, 0.8, eps=0.01, initial_scale=1.0, centered=True),
        ),
        (lambda: optim.clip_global_norm(1.5), lambda: optax.clip_by_global_norm(1.5)),
        (
            lambda: optim.scale_by_trust_ratio(coefficient=0.1),
            lambda: optax.scale_by_trust_ratio(trust_coefficient=0.1),
        ),
        (
            lambda: optim.make_optimizer({"name": "adam", "weight_decay": 0.1}, 0.1),
            lambda: optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1)),
        ),
        (
            lambda: optim.make_optimizer({"name": "adamw", "weight_decay": 0.1}, 0.1),
            lambda: optax.adamw(0.1, weight_decay=0.1),
        ),
        (
            lambda: optim.make_optimizer({"name": "nesterov"}, 0.1),
            lambda: optax.sgd(0.1, 0.9, nesterov=True),
        ),
        (lambda: optim.make_optimizer({"name": "adagrad"}, 0.1), lambda: optax.adagrad(0.1)),
    ],
    ids=[
        "lamb",
        "lars",
        "rmsprop",
        "rmsprop centered",
        "clip",
        "trust_ratio",
        "adam",
        "adamw",
        "nesterov",
        "adagrad",
    ],
)
def test_updates_are_those_of_optax(ours, theirs):
    with jax.enable_x64(True):
        params, grads = case()
        assert_close(after(ours(), params, grads)[0], after(theirs(), params, grads)[0])


def test_novograd_and_diffgrad_are_those_of_numpy():
    with jax.enable_x64(True):
        params, grads = case()
        actual, _ = after(optim.novograd(0.1, b1=0.9, b2=0.5), params, grads)
        other, _ = after(optim.diffgrad(0.1, b1=0.9, b2=0.5), params, grads)
        for name, start in params.items():
            weights, momentum, square = start, 0.0, None
            for grad in (g[name] for g in grads):
                newest = np.sum(np.abs(grad) ** 2)
                square = newest if square is None else 0.5 * square + 0.5 * newest
                momentum = 0.9 * momentum + grad / (np.sqrt(square) + 1e-8)
                weights = weights - 0.1 * momentum
            np.testing.assert_allclose(actual[name], weights, rtol=1e-12)

            weights, mu, nu, previous = start, 0.0, 0.0, 0.0
            for step, grad in enumerate((g[name] for g in grads), 1):
                mu, nu = 0.9 * mu + 0.1 * grad, 0.5 * nu + 0.5 * np.abs(grad) ** 2
                friction = 1 / (1 + np.exp(-np.abs(previous - grad)))
                rate = 0.1 * np.sqrt(1 - 0.5**step) / (1 - 0.9**step)
                weights = weights - rate * friction * mu / (np.sqrt(nu) + 1e-8)
                previous = grad
            np.testing.assert_allclose(other[name], weights, rtol=1e-12)


@pytest.mark.parametrize("name", some(BUILDS))
def test_a_phase_turns_the_run_and_real_numbers_stay_real(name):
    def times(factor, tree):
        return {key: leaf if key == "real" else factor * leaf for key, leaf in tree.items()}

    with jax.enable_x64(True):
        takes_stacks = name != "adafactor"
        tx = BUILDS[name](0.1, **{"rules": RULES} if takes_stacks else {})
        params, grads = case()
        expected, _ = after(tx, params, grads)
        phase = np.exp(0.7j)
        actual, _ = after(tx, times(phase, params), [times(phase, grad) for grad in grads])
        assert_close(actual, times(phase, expected))

        params, *grads = (jax.tree.map(np.real, tree) for tree in (params, *grads))
        expected, _ = after(tx, params, grads)
        actual, _ = after(tx, times(1 + 0j, params), [times(1 + 0j, grad) for grad in grads])
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", some(BUILDS))
def test_dtypes_and_jit(name, dtype):
    with jax.enable_x64(dtype == "complex128"):
        collect = {"collect": True} if name in PLAIN and takes(name, "collect") else {}
        tx = BUILDS[name](0.1, **collect)
        params, grads = case(2, dtype)
        weights, state = after(tx, params, grads)
        assert jax.tree.map(jnp.result_type, weights) == jax.tree.map(jnp.result_type, params)
        first = tx.init(params)
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, first)
        for field in ("nu", "nu_max", "accumulator", "norms", "diagnostics"):
            for leaf in jax.tree.leaves(getattr(state, field, None)):
                assert jnp.issubdtype(leaf.dtype, jnp.floating), field
        if collect:
            norm = np.linalg.norm(after(tx, params, grads[:1])[0]["kernel"].ravel())
            np.testing.assert_allclose(
                diagnostics.read(state)["weight_norms"]["kernel"], norm, rtol=1e-5
            )


def test_momentum_in_bfloat16_is_complex64_for_a_complex_leaf():
    state = optim.lamb(0.1, mu_dtype="bfloat16", nu_dtype="bfloat16").init(case(0, "complex64")[0])
    assert (state.mu["kernel"].dtype, state.mu["real"].dtype) == (jnp.complex64, jnp.bfloat16)
    assert state.nu["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("build", [optim.lamb, optim.rmsprop_tf])
def test_cautious_rejects_complex_leaves(build):
    with pytest.raises(
        ValueError, match="^cautious=True compares signs, .* 'kernel' is complex64,"
    ):
        build(0.1, cautious=True).init(case(0, "complex64")[0])
