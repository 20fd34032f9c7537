"""Compares each option of LARS with a NumPy loop, and tests properties that all options share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.presets import PRESETS, preset
from tests.optim import golden_lars, goldens
from tests.optim.golden_common import Settings
from tests.optim.runs import after, stacked_and_split

MU, WD, C, EPS = 0.8, 0.3, 0.1, 0.05
COMMON = {"momentum": MU, "weight_decay": WD, "coefficient": C, "eps": EPS}
RATES = [0.5, 2.0, 0.0, 0.03, 1.0]  # below and above the ratios, and 0
norm = np.linalg.norm


# The update of each implementation: (gradient, weights, momentum, rate, t) -> (step, new momentum).
def _of_2017(g, w, b, rate, t, length=norm):
    r = C * length(w) / (length(g) + WD * length(w) + EPS)
    b = MU * b + rate * r * (g + WD * w)
    return b, b


def _of_2017_nesterov(g, w, b, rate, t):
    s = rate * C * norm(w) / (norm(g) + WD * norm(w) + EPS) * (g + WD * w)
    b = MU * b + s
    return MU * b + s, b


def _optax(g, w, b, rate, t):
    d = g + WD * w
    b = MU * b + rate * C * norm(w) / (norm(d) + EPS) * d
    return b, b


def _simclr_popular_nesterov(g, w, b, rate, t):
    d = g + WD * w
    b = MU * b + d
    u = MU * b + d
    return rate * C * norm(w) / (norm(u) + EPS) * u, b


def _unscaled(g, w, b, rate, t, nesterov):
    r = C * norm(w) / (norm(g) + WD * norm(w) + EPS)
    b = MU * b + g
    return rate * r * (g + MU * b if nesterov else b), b


def _algorithm_1(g, w, b, rate, t, bounds=(0.0, np.inf)):
    b = MU * b + (1 - MU) * (g + WD * w)
    return rate * np.clip(norm(w), *bounds) / norm(b) * b, b


def _barlow_twins(g, w, b, rate, t):
    d = g + WD * w
    b = MU * b + C * norm(w) / norm(d) * d
    return rate * b, b


def _timm(g, w, b, rate, t, dampening=0.0, clip=False, nesterov=False):
    r = C * norm(w) / (norm(g) + WD * norm(w) + EPS)
    if clip:
        r = min(r, rate) / rate if rate else 1.0
    d = r * (g + WD * w)
    b = d if t == 0 else MU * b + (1 - dampening) * d
    return rate * (d + MU * b if nesterov else b), b


def _clipped_2017(g, w, b, rate, t):
    r = C * norm(w) / (norm(g) + WD * norm(w) + EPS)
    b = MU * b + min(r, rate) * (g + WD * w)
    return b, b


def _clipped_unscaled(g, w, b, rate, t):
    b = MU * b + g + WD * w
    return min(C * norm(w) / (norm(g) + WD * norm(w) + EPS), rate) * b, b


ALGORITHM_1 = {
    "denominator": "momentum",
    "accumulate": "gradients",
    "dampening": MU,
    "coefficient": 1.0,
    "eps": 0.0,
}
CASES = {
    "2017": ({}, _of_2017),
    "2017, l1": ({"norm": "l1"}, functools.partial(_of_2017, length=lambda x: np.abs(x).sum())),
    "2017, linf": ({"norm": "linf"}, functools.partial(_of_2017, length=lambda x: np.abs(x).max())),
    "2017, nesterov": ({"nesterov": True}, _of_2017_nesterov),
    "2017, clip": ({"trust_clip": True}, _clipped_2017),
    "optax": ({"denominator": "decayed"}, _optax),
    "simclr popular, nesterov": (
        {"denominator": "momentum", "accumulate": "gradients", "nesterov": True},
        _simclr_popular_nesterov,
    ),
    "unscaled": (
        {"accumulate": "gradients", "l2_in_loss": True},
        functools.partial(_unscaled, nesterov=False),
    ),
    "unscaled, nesterov": (
        {"accumulate": "gradients", "l2_in_loss": True, "nesterov": True},
        functools.partial(_unscaled, nesterov=True),
    ),
    "unscaled, decay in the gradient, clip": (
        {"accumulate": "gradients", "trust_clip": True},
        _clipped_unscaled,
    ),
    "algorithm 1": (ALGORITHM_1, _algorithm_1),
    "algorithm 1, phi": (
        ALGORITHM_1 | {"phi_bounds": (0.5, 2.0)},
        functools.partial(_algorithm_1, bounds=(0.5, 2.0)),
    ),
    "barlow twins": (
        {"denominator": "decayed", "accumulate": "adapted", "eps": 0.0},
        _barlow_twins,
    ),
    "timm, dampening": (
        {"accumulate": "adapted", "dampening": 0.3, "dampen_first": False},
        functools.partial(_timm, dampening=0.3),
    ),
    "timm, clip, nesterov": (
        {"accumulate": "adapted", "trust_clip": True, "nesterov": True},
        functools.partial(_timm, clip=True, nesterov=True),
    ),
}


def _random_tree(rng):
    return {"short": rng.standard_normal((3, 2)) / 9, "long": 5 * rng.standard_normal(7)}


@pytest.mark.parametrize("case", CASES)
def test_each_choice_is_its_formula(case):
    arguments, step = CASES[case]
    rng = np.random.default_rng(0)
    params = _random_tree(rng)
    grads = [_random_tree(rng) for _ in RATES]
    expected, buffers = dict(params), {name: np.zeros_like(w) for name, w in params.items()}
    for t, (grad, rate) in enumerate(zip(grads, RATES, strict=True)):
        for name, w in expected.items():
            delta, buffers[name] = step(grad[name], w, buffers[name], rate, t)
            expected[name] = w - delta
    with jax.enable_x64(True), jax.debug_nans(True):
        tx = optim.lars(lambda t: jnp.asarray(RATES)[t], **COMMON | arguments)
        actual, state = after(tx, jax.tree.map(jnp.asarray, params), grads)
    for name in params:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(state.momentum[name], buffers[name], rtol=1e-12, atol=1e-13)


def test_the_clip_takes_the_smaller_of_rate_and_ratio():
    # |w| / |g| = 10, so the ratio is 1 with the coefficient 0.1.
    params, grads = {"w": jnp.array([30.0, 40.0])}, {"w": jnp.array([3.0, 4.0])}
    for rate, local, ratio in ((0.25, 0.25, 1.0), (4.0, 1.0, 0.25), (0.0, 0.0, 1.0)):
        for accumulate in ("steps", "adapted", "gradients"):
            tx = optim.lars(
                rate,
                weight_decay=0.0,
                coefficient=0.1,
                trust_clip=True,
                accumulate=accumulate,
                collect=True,
            )
            with jax.debug_infs(True):  # no division by the rate 0
                updates, state = tx.update(grads, tx.init(params), params)
            np.testing.assert_allclose(updates["w"], -local * grads["w"], rtol=1e-6)
            np.testing.assert_allclose(state.diagnostics.ratios["w"], ratio, rtol=1e-6)


ZEROS = {"zero": jnp.zeros(2), "still": jnp.array([3.0, 4.0])}
ZERO_GRADS = {"zero": jnp.array([1.0, 2.0]), "still": jnp.zeros(2)}


@pytest.mark.parametrize(
    "arguments, zero, still",
    [
        ({}, 4.0, 4.0 * 0.5),  # rate 4, ratio 1, and the decay of 0.5 is added
        ({"zero_ratio": 0.25}, 1.0, 0.5),
        ({"skip_zero": True}, 4.0, 0.0),
        ({"trust_clip": True}, 1.0, 0.5),  # min(1, 4)
        ({"trust_clip": True, "skip_zero": True}, 4.0, 0.0),
        ({"l2_in_loss": True}, 4.0, 0.0),
        # The decay makes the divisor nonzero: 0.1 * 5 / (0.5 * 5).
        ({"denominator": "decayed"}, 4.0, 4.0 * 0.2 * 0.5),
        ({"denominator": "momentum", "accumulate": "gradients"}, 4.0, 4.0 * 0.2 * 0.5),
    ],
)
def test_norms_of_zero(arguments, zero, still):
    tx = optim.lars(4.0, weight_decay=0.5, coefficient=0.1, **arguments)
    with jax.debug_nans(True):
        updates, _ = tx.update(ZERO_GRADS, tx.init(ZEROS), ZEROS)
    np.testing.assert_allclose(updates["zero"], -zero * ZERO_GRADS["zero"], rtol=1e-6)
    np.testing.assert_allclose(updates["still"], -still * ZEROS["still"], rtol=1e-6)


@pytest.mark.parametrize("name", PRESETS["lars"])
def test_leaves_that_do_not_adapt_take_momentum_sgd_without_decay(name):
    rng = np.random.default_rng(0)
    grads = [{"bias": jnp.asarray(rng.standard_normal(3), jnp.float32)} for _ in range(4)]
    arguments = preset("lars", name) | {"weight_decay": 0.5}
    tx = optim.lars(0.1, rules=[("bias", {"decay": False, "adapt": False})], **arguments)
    share = 1 - arguments.get("dampening", 0.0)
    params = {"bias": jnp.ones(3)}
    expected, _ = after(optax.sgd(0.1 * share, momentum=0.9), params, grads)
    np.testing.assert_allclose(after(tx, params, grads)[0]["bias"], expected["bias"], rtol=1e-5)


@pytest.mark.parametrize("name", PRESETS["lars"])
def test_stacked_layers_equal_separate_layers(name):
    rng = np.random.default_rng(0)
    build = functools.partial(optim.lars, 0.5, **preset("lars", name) | {"eps": 0.1})
    scale = np.array([1.0, 10.0, 100.0, 0.0])[:, None, None]  # one layer is zero
    stack = jnp.asarray(rng.standard_normal((4, 3, 5)) * scale, jnp.float32)
    grads = [jnp.asarray(rng.standard_normal((4, 3, 5)), jnp.float32) for _ in range(3)]
    stacked, _ = after(build(rules=[("", {"layer_axes": (0,)})]), stack, grads)
    unrolled, _ = after(build(), list(stack), [list(grad) for grad in grads])
    np.testing.assert_allclose(stacked, unrolled, rtol=1e-6, atol=1e-6)
    assert not np.allclose(stacked, after(build(), stack, grads)[0], rtol=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"eps": 0.5},
        {"eps": 0.5, "trust_clip": True, "skip_zero": True, "accumulate": "adapted"},
        {"eps": 0.5, "denominator": "decayed"},
        {
            "eps": 0.5,
            "denominator": "momentum",
            "accumulate": "gradients",
            "phi_bounds": (0.0, 2.0),
        },
        {"clip_global_norm": 0.5},
    ],
    ids=str,
)
def test_shards_in_shard_map(arguments):
    build = functools.partial(optim.lars, 0.5, weight_decay=0.1, coefficient=0.3)
    stacked_and_split(functools.partial(build, **arguments))


def test_bfloat16_parameters_take_steps_computed_in_float32():
    rng = np.random.default_rng(0)
    narrow = {"w": jnp.asarray(rng.standard_normal((8, 8)), jnp.bfloat16)}
    grads = [{"w": jnp.asarray(rng.standard_normal((8, 8)), jnp.bfloat16)} for _ in range(2)]
    tx = optim.lars(0.5, coefficient=0.1, weight_decay=0.1)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), (narrow, grads))
    state, expected = tx.init(narrow), tx.init(widened[0])
    assert state.momentum["w"].dtype == jnp.float32
    for grad, wide in zip(grads, widened[1], strict=True):
        updates, state = tx.update(grad, state, narrow)
        reference, expected = tx.update(wide, expected, widened[0])
        assert updates["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(updates["w"], reference["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(state.momentum["w"], expected.momentum["w"])


def test_a_narrow_momentum_is_rounded_between_updates_only():
    params = {"w": jnp.array([3.0, 4.0])}
    grads = {"w": jnp.array([1.0, 1 / 3])}
    tx = optim.lars(
        1.0,
        momentum=0.5,
        weight_decay=0.0,
        rules=[("", {"adapt": False})],
        momentum_dtype=jnp.bfloat16,
    )
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(
        updates["w"], -grads["w"]
    )  # exactly, without rounding to bfloat16
    rounded = grads["w"].astype(jnp.bfloat16)
    assert state.momentum["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.momentum["w"], rounded)
    updates, _ = tx.update(grads, state, params)
    expected = -(0.5 * np.float32(rounded) + np.float32(grads["w"]))
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-7)


def test_weight_decay_may_be_a_schedule():
    params, grads = {"w": jnp.array([3.0, 4.0])}, [{"w": jnp.array([1.0, 2.0])}] * 2
    decays = [0.5, 0.0]
    actual, _ = after(optim.lars(1.0, 0.0, lambda t: jnp.asarray(decays)[t]), params, grads)
    expected = params
    for grad, decay in zip(grads, decays, strict=True):
        expected, _ = after(optim.lars(1.0, 0.0, decay), expected, [grad])
    np.testing.assert_allclose(actual["w"], expected["w"], rtol=1e-7)


def test_mlperfs_polynomial_is_the_recorded_one():
    entry = goldens.find(family="lars", setting="poly_schedule")
    rate = golden_lars.learning_rate(Settings(entry["hyper"]))
    actual = [rate(count) for count in range(20)]
    np.testing.assert_allclose(actual, goldens.record(entry)["lr"], rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"denominator": "update"}, "denominator='update' must be one of gradient, decayed, mom.*"),
        ({"accumulate": "rates"}, "accumulate='rates' must be one of steps, adapted, gradients"),
        (
            {"denominator": "momentum"},
            "accumulate='steps' must be 'gradients' with denominator='momentum'",
        ),
        ({"denominator": "decayed", "l2_in_loss": True}, "must be 'gradient' with l2_in_loss=True"),
        ({"denominator": "decayed", "skip_zero": True}, "must be 'gradient' with skip_zero=True"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.lars(**{"learning_rate": 0.1} | arguments)
