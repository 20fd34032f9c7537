"""Compares each option of RMSProp with a NumPy loop, and tests properties that all options share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from tests.optim.runs import after, equals_a_loop, rate, stacked_and_split


def reference(
    w,
    grads,
    decays=True,
    b2=0.9,
    momentum=0.9,
    eps=1e-3,
    initial_scale=1.0,
    eps_in_root=True,
    centered=False,
    bias_correction=False,
    lr_in_momentum=True,
    nesterov=False,
    cautious=False,
    weight_decay=0.0,
    decay="gradient",
):
    v, mean, b = np.full_like(w, initial_scale), np.zeros_like(w), np.zeros_like(w)
    w = w.copy()
    for t, g in enumerate(grads):
        wd = (weight_decay(t) if callable(weight_decay) else weight_decay) if decays else 0.0
        if decay == "gradient":
            g = g + wd * w
        v = b2 * v + (1 - b2) * g**2
        mean = b2 * mean + (1 - b2) * g
        correction = 1 - b2 ** (t + 1) if bias_correction else 1.0
        spread = v / correction - (mean / correction) ** 2 if centered else v / correction
        d = g / (np.sqrt(spread + eps) if eps_in_root else np.sqrt(spread) + eps)
        if lr_in_momentum:
            d = rate(t) * d
        b = momentum * b + d
        step = momentum * b + d if nesterov else b
        if cautious:
            mask = step * g > 0
            step = np.where(mask, step / max(mask.mean(), 1e-3), 0.0)
        if not lr_in_momentum:
            step = rate(t) * step
        if decay == "decoupled":
            step = step + rate(t) * wd * w
        w -= step
    return w


CHOICES = {
    "defaults": {},
    "b2": {"b2": 0.5},
    "momentum": {"momentum": 0.5},
    "no momentum": {"momentum": 0.0},
    "eps": {"eps": 0.1},
    "initial_scale": {"initial_scale": 0.0},
    "eps outside": {"eps_in_root": False},
    "centered": {"centered": True},
    "centered, no momentum": {"centered": True, "momentum": 0.0, "eps_in_root": False},
    "bias correction": {"bias_correction": True, "initial_scale": 0.0},
    "bias correction, centered": {"bias_correction": True, "centered": True},
    "lr outside": {"lr_in_momentum": False},
    "nesterov": {"nesterov": True},
    "nesterov, lr outside": {"nesterov": True, "lr_in_momentum": False},
    "cautious": {"cautious": True},
    "cautious, nesterov, lr outside": {
        "cautious": True,
        "nesterov": True,
        "lr_in_momentum": False,
        "weight_decay": 0.3,
    },
    "cautious, no momentum": {"cautious": True, "momentum": 0.0, "decay": "decoupled"},
    "weight decay": {"weight_decay": 0.3},
    "scheduled weight decay": {"weight_decay": lambda t: 0.1 * (t + 1)},
    "decoupled": {"weight_decay": 0.3, "decay": "decoupled"},
    "decoupled, lr outside": {"weight_decay": 0.3, "decay": "decoupled", "lr_in_momentum": False},
    "pytorch": {
        "b2": 0.99,
        "momentum": 0.9,
        "eps": 1e-8,
        "initial_scale": 0.0,
        "eps_in_root": False,
        "lr_in_momentum": False,
    },
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_against_a_loop(name):
    changed = None if name == "defaults" else "kernel"
    equals_a_loop(optim.rmsprop_tf, reference, CHOICES[name], changed, exempt=("decay",))


def test_a_step_taken_at_a_high_rate_keeps_its_length_only_in_the_momentum():
    params, grads = {"w": jnp.array([1.0])}, {"w": jnp.array([1.0])}
    rates = jnp.array([1.0, 0.0])
    for inside, expected in ((True, -0.9 / np.sqrt(1.001)), (False, 0.0)):
        tx = optim.rmsprop_tf(lambda t: rates[t], lr_in_momentum=inside)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        np.testing.assert_allclose(updates["w"], [expected], rtol=1e-6)


def test_only_needed_buffers_are_stored():
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}

    def buffers(**arguments):
        state = optim.rmsprop_tf(0.1, **arguments).init(params)
        return [len(jax.tree.leaves(tree)) for tree in (state.nu, state.mean, state.momentum)]

    assert buffers() == [2, 0, 2]
    assert buffers(momentum=0.0, centered=True) == [2, 2, 0]


def test_rounding_does_not_make_a_variance_negative():
    # With a constant gradient, the second moment and the squared mean become equal up to rounding.
    params, grads = {"w": jnp.ones(64)}, [{"w": jnp.linspace(0.1, 7.3, 64)}] * 60
    tx = optim.rmsprop_tf(1e-6, b2=0.5, eps=1e-12, initial_scale=0.0, centered=True)
    with jax.debug_nans(True):
        actual, _ = after(tx, params, grads)
    assert np.isfinite(actual["w"]).all()


def test_zeros():
    params = {"zero": jnp.zeros(2), "still": jnp.array([3.0, 4.0])}
    grads = {"zero": jnp.array([0.3, -0.4]), "still": jnp.zeros(2)}
    tx = optim.rmsprop_tf(0.1, weight_decay=0.5, cautious=True, collect=True)
    updates, state = tx.update(grads, tx.init(params), params)
    for leaf, grad in (("zero", grads["zero"]), ("still", 0.5 * params["still"])):
        expected = -0.1 * grad / np.sqrt(0.9 + 0.1 * grad**2 + 1e-3)
        np.testing.assert_allclose(updates[leaf], expected, rtol=1e-6)
    assert state.diagnostics.ratios == {"zero": 1.0, "still": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [{"cautious": True}, {"clip_global_norm": 1.0}, {"centered": True}], ids=str
)
def test_stacks_and_shards(arguments):
    stacked_and_split(
        functools.partial(optim.rmsprop_tf, 0.1, weight_decay=0.1, **arguments),
        takes_norms="centered" not in arguments,
    )


def test_bfloat16_parameters_keep_float32_state():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    grads = [{"w": jnp.full(3, 1.001, jnp.float32)}]
    _, state = after(optim.rmsprop_tf(0.1, centered=True), params, grads)
    for buffer in (state.nu, state.mean, state.momentum):
        assert buffer["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.nu["w"], 0.9 + 0.1 * 1.001**2, rtol=1e-6)
    narrow = optim.rmsprop_tf(0.1, nu_dtype="bfloat16", momentum_dtype="bfloat16").init(params)
    assert narrow.nu["w"].dtype == narrow.momentum["w"].dtype == jnp.bfloat16


def test_a_choice_that_is_unknown():
    with pytest.raises(ValueError, match="decay='momentum' must be one of gradient, decoupled"):
        optim.rmsprop_tf(0.1, decay="momentum")
