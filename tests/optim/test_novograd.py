"""Compares each option of NovoGrad with a NumPy loop, and tests properties that all options share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.presets import PRESETS, preset
from tests.optim.runs import after, case, equals_a_loop, rate, stacked_and_split


def reference(
    w,
    grads,
    decays=True,
    adapts=True,
    b1=0.95,
    b2=0.98,
    eps=1e-8,
    weight_decay=0.0,
    grad_averaging="none",
    normalise="gradient",
    decay="momentum",
    lr_in_momentum=False,
    bias_correction=False,
    init_zero=False,
    amsgrad=False,
    eps_root=0.0,
    norm="l2",
):
    """Returns the weights of one layer after all updates."""
    m, v, largest, w = np.zeros_like(w), 0.0, 0.0, w.copy()
    for t, g in enumerate(grads):
        wd = (weight_decay(t) if callable(weight_decay) else weight_decay) if decays else 0.0
        newest = np.sum(g**2) if norm == "l2" else np.abs(g).max()
        v = newest if v == 0 and not init_zero else b2 * v + (1 - b2) * newest
        largest = max(largest, v) if amsgrad else v
        length = np.sqrt(largest + eps_root if norm == "l2" else largest**2 + eps_root)
        if bias_correction:
            length /= np.sqrt(1 - b2 ** (t + 1))
        factor = 1 / (length + eps) if adapts and largest > 0 else 1.0

        d = factor * g if normalise == "gradient" else g.copy()
        if decay == "momentum":
            d += wd * w
        if grad_averaging == "all" or (grad_averaging == "after_first" and t > 0):
            d *= 1 - b1
        m = b1 * m + (rate(t) * d if lr_in_momentum else d)
        step = m / (1 - b1 ** (t + 1)) if bias_correction else m
        if normalise == "momentum":
            step = factor * step
        if not lr_in_momentum:
            step = rate(t) * step
        if decay == "decoupled":
            step = step + rate(t) * wd * w
        w -= step
    return w


CHOICES = {
    "defaults": {},
    "betas": {"b1": 0.5, "b2": 0.5},
    "the newest gradient alone": {"b2": 0.0},
    "eps": {"eps": 0.5},
    "eps_root": {"eps_root": 0.5},
    "weight decay": {"weight_decay": 0.3},
    "scheduled weight decay": {"weight_decay": lambda t: 0.1 * (t + 1)},
    "decoupled": {"weight_decay": 0.3, "decay": "decoupled"},
    "averaging": {"grad_averaging": "all", "weight_decay": 0.3},
    "averaging after the first": {"grad_averaging": "after_first", "weight_decay": 0.3},
    "lr in the momentum": {"lr_in_momentum": True, "weight_decay": 0.3},
    "lr in the momentum, decoupled": {
        "lr_in_momentum": True,
        "weight_decay": 0.3,
        "decay": "decoupled",
    },
    "bias correction": {"bias_correction": True},
    "init_zero": {"init_zero": True},
    "init_zero, bias correction": {"init_zero": True, "bias_correction": True},
    "amsgrad": {"amsgrad": True, "b2": 0.5},
    "linf": {"norm": "linf"},
    "linf, eps_root": {"norm": "linf", "eps_root": 0.5},
    "linf, init_zero, amsgrad": {"norm": "linf", "init_zero": True, "amsgrad": True, "b2": 0.5},
    "momentum divided": {"normalise": "momentum", "decay": "decoupled", "weight_decay": 0.3},
    "momentum divided, lr inside": {
        "normalise": "momentum",
        "decay": "decoupled",
        "lr_in_momentum": True,
        "bias_correction": True,
        "grad_averaging": "all",
    },
    **{name: preset("novograd", name) for name in PRESETS["novograd"]},
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_against_a_loop(name):
    changed = None if name in ("defaults", "paper") else "kernel"
    equals_a_loop(optim.novograd, reference, CHOICES[name], changed, rtol=1e-12)


def test_the_average_starts_with_the_first_gradient_that_is_not_zero():
    params = {"late": jnp.array([3.0, 4.0])}
    tx = optim.novograd(0.1, b1=0.0)
    steps, state = [], tx.init(params)
    for grad in ([0.0, 0.0], [0.6, 0.8], [0.6, 0.8]):
        updates, state = tx.update({"late": jnp.array(grad)}, state, params)
        steps.append(np.linalg.norm(updates["late"]))
        assert state.nu["late"].shape == (1,)
    # With a start at the first update, the second step would have the length 0.1 / sqrt(0.02) =
    # 0.71.
    np.testing.assert_allclose(steps, [0.0, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(state.nu["late"], [1.0], rtol=1e-6)


def test_zeros():
    params = {"zero": jnp.zeros(2), "still": jnp.array([3.0, 4.0])}
    grads = {"zero": jnp.array([0.3, 0.4]), "still": jnp.zeros(2)}
    tx = optim.novograd(0.1, eps=0.0, weight_decay=0.5, collect=True)
    with jax.debug_nans(True):
        updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["zero"], [-0.06, -0.08], rtol=1e-6)
    np.testing.assert_allclose(updates["still"], -0.05 * params["still"], rtol=1e-6)
    assert state.diagnostics.ratios == {"zero": 2.0, "still": 1.0}


def test_leaves_that_do_not_adapt_take_momentum_sgd():
    params, grads = case()
    tx = optim.novograd(0.1, rules=[("", {"adapt": False})])
    actual, state = after(tx, params, grads)
    expected, _ = after(optax.sgd(0.1, momentum=0.95), params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)
    assert jax.tree.leaves(state.nu) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [{"amsgrad": True}, {"norm": "linf"}, preset("novograd", "apex")], ids=str
)
def test_stacks_and_shards(arguments):
    stacked_and_split(
        functools.partial(
            optim.novograd,
            0.1,
            weight_decay=0.1,
            **{key: value for key, value in arguments.items() if key != "weight_decay"},
        )
    )


def test_clipping_comes_first():
    params, grads = case()
    norms = [np.sqrt(sum((g**2).sum() for g in grad.values())) for grad in grads]
    limit = float(np.mean(norms))
    with jax.enable_x64(True):
        actual, _ = after(optim.novograd(rate, clip_global_norm=limit), params, grads)
    for leaf, weights in params.items():
        clipped = [g[leaf] * min(1, limit / n) for g, n in zip(grads, norms, strict=True)]
        np.testing.assert_allclose(
            actual[leaf], reference(weights, clipped), rtol=1e-12, atol=1e-13
        )


def test_bfloat16_parameters_keep_float32_state():
    # In bfloat16 a second moment of 1000 would not change by adding 0.02 * 100.
    params = {"w": jnp.ones(1000, jnp.bfloat16)}
    grads = [{"w": jnp.ones(1000, jnp.bfloat16)}, {"w": jnp.full(1000, 0.949, jnp.bfloat16)}]
    _, state = after(optim.novograd(0.1), params, grads)
    second = 1000 * float(jnp.bfloat16(0.949)) ** 2
    assert state.nu["w"].dtype == state.mu["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.nu["w"], [0.98 * 1000 + 0.02 * second], rtol=1e-6)


def test_dtypes_asked_for():
    params, grads = case()
    tx = optim.novograd(0.1, mu_dtype="bfloat16", nu_dtype="float32")
    with jax.enable_x64(True):
        actual, state = after(tx, params, grads)
        expected, _ = after(optim.novograd(0.1), params, grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.mu)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), actual, expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"grad_averaging": True}, "grad_averaging=True must be one of none, all, after_first"),
        ({"normalise": "both"}, "normalise='both' must be one of gradient, momentum"),
        ({"decay": "gradient"}, "decay='gradient' must be one of momentum, decoupled"),
        ({"norm": "l1"}, "norm='l1' must be one of l2, linf"),
        (
            {"normalise": "momentum"},
            "decay='momentum' must be 'decoupled' with normalise='momentum'",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.novograd(**{"learning_rate": 0.1} | arguments)
