"""Compares diffGrad with a NumPy loop and with Adam."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from tests.optim.runs import after, equals_a_loop, rate, stacked_and_split


def reference(w, grads, decays=True, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    m, v, previous, w = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w), w.copy()
    for t, g in enumerate(grads):
        wd = (weight_decay(t) if callable(weight_decay) else weight_decay) if decays else 0.0
        g = g + wd * w
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        friction = 1 / (1 + np.exp(-np.abs(previous - g)))
        length = rate(t) * np.sqrt(1 - b2 ** (t + 1)) / (1 - b1 ** (t + 1))
        w -= length * friction * m / (np.sqrt(v) + eps)
        previous = g
    return w


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"b1": 0.5, "b2": 0.9},
        {"b1": 0.0},
        {"eps": 0.1},
        {"weight_decay": 0.3},
        {"weight_decay": lambda t: 0.1 * (t + 1)},
    ],
)
def test_every_choice_against_a_loop(arguments):
    changed = "kernel" if arguments else None
    equals_a_loop(optim.diffgrad, reference, arguments, changed, exempt=("decay",))


def test_the_step_is_half_of_adams_for_constant_gradients_and_full_for_jumps():
    params = {"w": jnp.array([1.0, 1.0])}
    tx, adam = optim.diffgrad(0.1, eps=0.0), optax.adam(0.1, eps=0.0)
    state, adams = tx.init(params), adam.init(params)
    for grad in ([2.0, 90.0], [2.0, -90.0]):
        updates, state = tx.update({"w": jnp.array(grad)}, state, params)
        expected, adams = adam.update({"w": jnp.array(grad)}, adams, params)
    np.testing.assert_allclose(updates["w"] / expected["w"], [0.5, 1.0], rtol=1e-4)


def test_zeros():
    params = {"zero": jnp.zeros(2), "still": jnp.array([3.0, 4.0])}
    grads = {"zero": jnp.array([0.3, -0.4]), "still": jnp.zeros(2)}
    tx = optim.diffgrad(0.1, collect=True)
    updates, state = tx.update(grads, tx.init(params), params)
    # Adam's first step is the sign; the coefficient compares the gradient with 0.
    np.testing.assert_allclose(
        updates["zero"], [-0.1 / (1 + np.exp(-0.3)), 0.1 / (1 + np.exp(-0.4))], rtol=1e-5
    )
    assert not updates["still"].any()
    assert state.diagnostics.ratios == {"zero": 1.0, "still": 1.0}


def test_stacks_and_shards():
    # Only clipping uses a norm, and it is the norm over all layers.
    for arguments in ({"weight_decay": 0.1}, {"clip_global_norm": 1.0}):
        stacked_and_split(
            functools.partial(optim.diffgrad, 0.1, **arguments),
            takes_norms="clip_global_norm" in arguments,
        )


def test_bfloat16_parameters_keep_float32_state():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    grads = [{"w": jnp.full(3, value, jnp.float32)} for value in (1.0, 1.001)]
    _, state = after(optim.diffgrad(0.1), params, grads)
    assert state.previous["w"].dtype == state.nu["w"].dtype == jnp.float32
    # bfloat16 would round 1.001 to 1: the numbers next to 1 are 1 + 2 ** -7 and 1 - 2 ** -8.
    np.testing.assert_allclose(state.previous["w"], 1.001, rtol=1e-7)
    np.testing.assert_allclose(state.nu["w"], 0.999e-3 + 1.001**2 * 1e-3, rtol=1e-5)
    tx = optim.diffgrad(0.1, mu_dtype="bfloat16", nu_dtype="bfloat16")
    narrow = tx.init(params)
    assert narrow.mu["w"].dtype == narrow.nu["w"].dtype == jnp.bfloat16
