"""Compares LAMB with a loop written from the formulas, and tests known failure modes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from tests.optim import golden, goldens
from tests.optim.runs import after, case, equals_a_loop, rate, stacked_and_split


def reference(
    weights,
    grads,
    *,
    decays=True,
    adapts=True,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    bias_correction="moments",
    decay="direction",
    norm="l2",
    phi_bounds=(0, math.inf),
    ratio_bounds=(0, math.inf),
    ratio_eps=0.0,
    zero_ratio=1.0,
    eps_root=0.0,
    grad_averaging=True,
    nesterov="none",
    cautious=False,
):
    """Returns the weights of one layer after all gradients, in NumPy and float64."""
    order = {"l2": 2, "l1": 1, "linf": np.inf}[norm]
    m = v = np.zeros_like(weights)
    for t, g in enumerate(grads, start=1):
        eta = rate(t - 1)
        wd = weight_decay(t - 1) if callable(weight_decay) else weight_decay
        wd = wd if decays else 0.0
        if decay == "gradient":
            g = g + wd * weights
        m = b1 * m + ((1 - b1) if grad_averaging else 1) * g
        v = b2 * v + (1 - b2) * g**2
        c1, c2, next1, next2 = 1 - b1**t, 1 - b2**t, 1 - b1 ** (t + 1), 1 - b2 ** (t + 1)
        if bias_correction != "moments":
            c1 = c2 = next1 = next2 = 1.0
        m_hat, v_hat = m / c1, v / c2
        if nesterov != "none":
            m_hat = b1 * m / next1 + (1 - b1) * g / c1
            v_hat = b2 * v / c2
        if nesterov == "both":
            v_hat = b2 * v / next2 + (1 - b2) * g**2 / c2
        u = m_hat / (np.sqrt(v_hat + eps_root) + eps)
        if cautious:
            same = u * g > 0
            u = u * same / max(same.mean(), 1e-3)
        if decay == "decoupled":
            weights = weights - eta * wd * weights
        if decay == "direction":
            u = u + wd * weights
        r = 1.0
        if adapts:
            w_norm, u_norm = (np.linalg.norm(x.ravel(), order) for x in (weights, u))
            if w_norm > 0 and u_norm > 0:
                r = np.clip(w_norm, *phi_bounds) / (u_norm + ratio_eps)
                r = np.clip(r, *ratio_bounds)
            else:
                r = zero_ratio
        if bias_correction == "step":
            eta = eta * math.sqrt(1 - b2**t) / (1 - b1**t)
        weights = weights - eta * r * u
    return weights


CHOICES = {
    "defaults": {},
    "betas": {"b1": 0.5, "b2": 0.9},
    "b1 of 0": {"b1": 0.0},
    "eps": {"eps": 0.1},
    "eps_root": {"eps_root": 0.1},
    "no weight decay": {"weight_decay": 0.0},
    "large weight decay": {"weight_decay": 0.5},
    "scheduled weight decay": {"weight_decay": lambda t: 0.1 * (t + 1)},
    "no bias correction": {"bias_correction": "none"},
    "corrected step": {"bias_correction": "step"},
    "decoupled decay": {"decay": "decoupled", "weight_decay": 0.5},
    "decay in the gradient": {"decay": "gradient", "weight_decay": 0.5},
    "l1": {"norm": "l1"},
    "linf": {"norm": "linf"},
    "phi_bounds": {"phi_bounds": (1.9, 2.2)},
    "ratio_bounds": {"ratio_bounds": (0.9, 1.1)},
    "ratio_eps": {"ratio_eps": 1.0},
    "zero_ratio": {"zero_ratio": 0.5},
    "whole gradients": {"grad_averaging": False},
    "N-LAMB": {"nesterov": "first"},
    "NN-LAMB": {"nesterov": "both"},
    "N-LAMB without correction": {"nesterov": "first", "bias_correction": "none"},
    "NN-LAMB without correction": {"nesterov": "both", "bias_correction": "none"},
    "cautious": {"cautious": True},
    "cautious, decoupled, corrected step": {
        "cautious": True,
        "decay": "decoupled",
        "bias_correction": "step",
        "weight_decay": 0.5,
    },
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_against_a_loop(name):
    changed = {"defaults": None, "zero_ratio": "zero"}.get(name, "kernel")
    equals_a_loop(optim.lamb, reference, CHOICES[name], changed)


def test_clipping_comes_before_the_moments_and_before_decay_in_the_gradient():
    params, grads = case()
    norms = [math.sqrt(sum((g**2).sum() for g in grad.values())) for grad in grads]
    limit = float(np.median(norms))
    tx = optim.lamb(rate, decay="gradient", weight_decay=0.5, clip_global_norm=limit)
    with jax.enable_x64(True):
        actual, _ = after(tx, params, grads)
    for leaf, weights in params.items():
        clipped = [
            grad[leaf] * min(1.0, limit / norm) for grad, norm in zip(grads, norms, strict=True)
        ]
        expected = reference(weights, clipped, decay="gradient", weight_decay=0.5)
        np.testing.assert_allclose(actual[leaf], expected, rtol=1e-11, atol=1e-13, err_msg=leaf)


@pytest.mark.parametrize(
    "arguments",
    [{"cautious": True}, {"nesterov": "both", "decay": "decoupled"}, {"bias_correction": "step"}],
    ids=str,
)
def test_stacks_and_shards(arguments):
    stacked_and_split(functools.partial(optim.lamb, 0.1, **arguments))


def test_n_lamb_and_nn_lamb_by_hand():
    # The first update from weights of 0 has the ratio 1. With b1 = 0.5, b2 = 0.75 and g = 2, m = 1
    # and v = 1; for the next update 1 - b1^2 = 3/4 and 1 - b2^2 = 7/16.
    m_hat = 0.5 * 1 / (3 / 4) + 0.5 * 2 / 0.5  # 8/3
    v_hat = {"first": 0.75 * 1 / 0.25, "both": 0.75 * 1 / (7 / 16) + 0.25 * 4 / 0.25}
    for nesterov, square in v_hat.items():
        tx = optim.lamb(1.0, b1=0.5, b2=0.75, eps=0.0, nesterov=nesterov)
        params = {"w": jnp.zeros(3)}
        updates, _ = tx.update({"w": jnp.full(3, 2.0)}, tx.init(params), params)
        np.testing.assert_allclose(updates["w"], -m_hat / math.sqrt(square), rtol=1e-6)


def test_golden_ratios_are_read_from_the_state():
    entry = goldens.find(family="lamb", implementation="timm_lamb", setting="excl")
    params = goldens.params()
    record, inputs = goldens.record(entry), goldens.inputs()
    rules = [("bias|LayerNorm", {"decay": False, "adapt": False}), ("", {})]
    tx = optim.lamb(entry["hyper"]["lr"], rules=rules, collect=True)
    same = golden.transform_for(entry, params)
    state, plain = tx.init(params), same.init(params)
    for step in range(3):
        grads = {name: jnp.asarray(inputs["wgrad/" + name][0, step]) for name in params}
        updates, state = tx.update(grads, state, params)
        expected, plain = same.update(grads, plain, params)
        for name in params:
            np.testing.assert_array_equal(
                updates[name], expected[name]
            )  # collecting does not change the update
            norm = state.diagnostics.update_norms[name]
            np.testing.assert_allclose(norm, np.linalg.norm(updates[name]), rtol=1e-5)
            norm = state.diagnostics.weight_norms[name]
            np.testing.assert_allclose(norm, np.linalg.norm(params[name]), rtol=1e-5)
            np.testing.assert_allclose(
                state.diagnostics.ratios[name],
                record["trust/" + name][step],
                rtol=2e-6,
                err_msg=name,
            )
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("arguments", [{}, {"cautious": True}, {"ratio_bounds": (0.1, 1.0)}])
def test_a_nan_gradient_is_not_hidden(arguments):
    params = {"kernel": jnp.ones(3), "other": jnp.ones(2)}
    grads = {"kernel": jnp.array([1.0, jnp.nan, 1.0]), "other": jnp.ones(2)}
    tx = optim.lamb(0.1, **arguments)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert np.isnan(updates["kernel"]).all() and np.isfinite(updates["other"]).all()
    tx = optim.lamb(0.1, clip_global_norm=1.0, **arguments)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert np.isnan(updates["kernel"]).all() and np.isnan(updates["other"]).all()


def test_bfloat16_parameters_keep_float32_moments():
    grads = np.random.default_rng(0).standard_normal((50, 4, 4)).astype(np.float32)
    grads = np.asarray(jnp.asarray(grads, jnp.bfloat16), np.float32)
    tx = optim.lamb(0.0, b2=0.999)
    nus = []
    for dtype in (jnp.bfloat16, jnp.float32):
        params = {"kernel": jnp.ones((4, 4), dtype)}
        state = tx.init(params)
        for grad in grads:
            _, state = tx.update({"kernel": jnp.asarray(grad, dtype)}, state, params)
        assert state.nu["kernel"].dtype == jnp.float32
        nus.append(state.nu["kernel"])
    # In bfloat16 1 - b2 is 0 and b2 is 1, so second moments would never change.
    np.testing.assert_allclose(nus[0], nus[1], rtol=1e-6)
    expected = sum(0.001 * 0.999 ** (49 - t) * grads[t].astype(np.float64) ** 2 for t in range(50))
    np.testing.assert_allclose(nus[0], expected, rtol=1e-5)


def test_moments_in_the_dtype_asked_for():
    params = {"kernel": jnp.ones((2, 2))}
    tx = optim.lamb(0.1, mu_dtype=jnp.bfloat16, nu_dtype="bfloat16")
    _, state = tx.update(params, tx.init(params), params)
    assert state.mu["kernel"].dtype == jnp.bfloat16
    assert state.nu["kernel"].dtype == jnp.bfloat16


@pytest.mark.optimized
@pytest.mark.parametrize("compute", ["eager", "jit"])
def test_large_tensors_take_the_same_norms(compute):
    # From 4,096 values on, the CPU computes sums in windows.
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.standard_normal((3, 48, 64)), jnp.float32)}
    grads = {"kernel": jnp.asarray(rng.standard_normal((3, 48, 64)), jnp.float32)}
    tx = optim.lamb(0.1, rules=[("", {"layer_axes": (0,)})], collect=True)
    update = jax.jit(tx.update) if compute == "jit" else tx.update
    _, state = update(grads, tx.init(params), params)
    weights, grad = (np.asarray(tree["kernel"], np.float64) for tree in (params, grads))
    direction = grad / (np.abs(grad) + 1e-6) + 0.01 * weights
    expected = [np.linalg.norm(weights[i]) / np.linalg.norm(direction[i]) for i in range(3)]
    np.testing.assert_allclose(state.diagnostics.ratios["kernel"], expected, rtol=2e-6)


@pytest.mark.optimized
def test_the_direction_is_computed_again_and_not_stored():
    params = {str(i): jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(16)}
    num_bytes = sum(4 * p.size for p in params.values())
    tx = optim.lamb(0.1)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * num_bytes


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"norm": "l3"}, "norm='l3' must be one of l2, l1, linf"),
        ({"bias_correction": True}, "bias_correction=True must be one of moments, none, step"),
        ({"decay": "l2"}, "decay='l2' must be one of direction, decoupled, gradient"),
        ({"nesterov": True}, "nesterov=True must be one of none, first, both"),
        ({"clip_global_norm": 0.0}, "clip_global_norm=0.0 must be above 0; leave it out"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.lamb(**{"learning_rate": 0.1, **arguments})


def test_hyperparameters_injected_in_bfloat16_are_rejected():
    params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    tx = optax.inject_hyperparams(optim.lamb)(learning_rate=0.1)
    with pytest.raises(ValueError, match="bfloat16 array, which is too imprecise"):
        tx.init(params)
    tx = optax.inject_hyperparams(optim.lamb, hyperparam_dtype=jnp.float32)(learning_rate=0.1)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["kernel"].dtype == jnp.bfloat16
