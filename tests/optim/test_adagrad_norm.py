"""Compares AdaGrad-Norm with a NumPy loop, with one step length for the model or for each layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from tests.optim.runs import after, case, stacked_and_split

RULES = [("bias", {"decay": False}), ("", {"adapt": False})]


def rate(t):
    return 1.0 / (t + 1)


def reference(params, grads, initial_norm=0.1, weight_decay=0.0):
    """Returns the parameters after all updates, and the accumulator."""
    params, total = {name: w.copy() for name, w in params.items()}, initial_norm**2
    for t, grad in enumerate(grads):
        wd = weight_decay(t) if callable(weight_decay) else weight_decay
        grad = {name: g + wd * params[name] if name != "bias" else g for name, g in grad.items()}
        total += sum((g**2).sum() for g in grad.values())
        for name, g in grad.items():
            if total > 0:
                params[name] -= rate(t) / np.sqrt(total) * g
    return params, total


ARGUMENTS = [
    {},
    {"initial_norm": 3.0},
    {"initial_norm": 0.0},
    {"weight_decay": 0.3},
    {"weight_decay": lambda t: 0.1 * (t + 1)},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_one_number_for_the_model(arguments):
    params, grads = case()
    with jax.enable_x64(True), jax.debug_nans(True):
        actual, state = after(optim.adagrad_norm(rate, rules=RULES, **arguments), params, grads)
    expected, total = reference(params, grads, **arguments)
    for leaf in params:
        np.testing.assert_allclose(actual[leaf], expected[leaf], rtol=1e-12, atol=1e-13)
    assert state.accumulator.shape == ()
    np.testing.assert_allclose(state.accumulator, total, rtol=1e-12)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_one_number_for_each_layer(arguments):
    params, grads = case()
    tx = optim.adagrad_norm(rate, rules=RULES, per_layer=True, **arguments)
    with jax.enable_x64(True), jax.debug_nans(True):
        actual, state = after(tx, params, grads)
    for leaf, w in params.items():
        expected, total = reference({leaf: w}, [{leaf: grad[leaf]} for grad in grads], **arguments)
        np.testing.assert_allclose(actual[leaf], expected[leaf], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(np.asarray(state.accumulator[leaf]).sum(), total, rtol=1e-12)


def test_no_step_while_all_gradients_are_zero():
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.zeros(())}
    for per_layer in (False, True):
        tx = optim.adagrad_norm(1.0, initial_norm=0.0, per_layer=per_layer, collect=True)
        state = tx.init(params)
        with jax.debug_nans(True):
            updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        assert not any(u.any() for u in jax.tree.leaves(updates))
        updates, state = tx.update({"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(())}, state, params)
        np.testing.assert_allclose(updates["a"], [-0.6, -0.8], rtol=1e-6)
        np.testing.assert_allclose(state.diagnostics.ratios["a"], 0.2, rtol=1e-6)


def test_the_step_does_not_depend_on_the_scale_of_the_loss():
    params, grads = case()
    large = [{name: 1000 * g for name, g in grad.items()} for grad in grads]
    with jax.enable_x64(True):
        tx = optim.adagrad_norm(rate, initial_norm=0.0)
        actual, expected = after(tx, params, large)[0], after(tx, params, grads)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), actual, expected)


@pytest.mark.parametrize("per_layer", [False, True])
def test_stacks_and_shards(per_layer):
    stacked_and_split(
        functools.partial(
            optim.adagrad_norm, 1.0, per_layer=per_layer, weight_decay=0.1, collect=True
        )
    )


def test_narrow_parameters_keep_a_float32_accumulator():
    # In float16 the square of 300 overflows; in bfloat16 1000 + 1 is 1000.
    for dtype in (jnp.float16, jnp.bfloat16):
        params = {"w": jnp.ones(2, dtype)}
        grads = [{"w": jnp.array([300.0, 0.0], dtype)}, {"w": jnp.array([1.0, 0.0], dtype)}]
        for per_layer in (False, True):
            tx = optim.adagrad_norm(0.1, initial_norm=0.0, per_layer=per_layer)
            _, state = after(tx, params, grads)
            (total,) = jax.tree.leaves(state.accumulator)
            assert total.dtype == jnp.float32 and total.sum() == 90001.0
