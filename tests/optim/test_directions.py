"""Tests that chains of transforms equal `lamb` and `lars`, in most cases bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import diagnostics
from tests.marks import some
from tests.optim import runs

P = PartitionSpec
RATE = optim.warmup(0.1, 10, 2)
RULES = [
    ("stack", {"layer_axes": (0,)}),
    ("bias|scale", {"decay": False, "adapt": False}),
    ("zero", {"decay": False}),
    ("", {}),
]
PARAMS, GRADS = runs.case(steps=4)
PARAMS["stack"] = np.random.default_rng(2).standard_normal((3, 4, 5))
for step, grad in enumerate(GRADS):
    grad["stack"] = np.random.default_rng(3 + step).standard_normal((3, 4, 5))
LAMB = [
    {},
    {"bias_correction": "none"},
    {"nesterov": "first"},
    {"nesterov": "both", "b1": 0.5},
    {"cautious": True},
    {"grad_averaging": False, "eps_root": 1e-4, "mu_dtype": "bfloat16"},
]


def lamb_of_links(
    weight_decay=0.01, rules=RULES, axis_name=None, collect=False, ratio=None, **arguments
):
    return optax.chain(
        optim.scale_by_lamb(rules=rules, axis_name=axis_name, **arguments),
        optim.add_decayed_weights(weight_decay, rules),
        optim.scale_by_trust_ratio(rules, axis_name=axis_name, collect=collect, **(ratio or {})),
        optax.scale_by_learning_rate(RATE),
    )


def lars_of_links(order, weight_decay=0.1, coefficient=0.01, **momentum):
    links = {
        "ratio": optim.scale_by_trust_ratio(RULES, coefficient=coefficient),
        "momentum": optim.scale_by_lars(**momentum),
        "rate": optax.scale_by_learning_rate(RATE),
    }
    decay = optim.add_decayed_weights(weight_decay, RULES)
    return optax.chain(decay, *(links[name] for name in order.split()))


def trained(tx, dtype="float32", compiled=True):
    """Returns the weights after four updates, compiled or run one operation at a time."""
    params, *grads = (
        jax.tree.map(lambda x: jnp.asarray(x, dtype), tree) for tree in (PARAMS, *GRADS)
    )
    state, update = tx.init(params), jax.jit(tx.update) if compiled else tx.update
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


# On some processors XLA contracts products and sums differently in two programs with the same
# operations.
ROUNDING = 1e-6


def assert_same(actual, expected, rounding=0.0):
    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding)

    jax.tree.map(same, actual, expected)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("arguments", LAMB, ids=str)
def test_the_links_of_lamb_are_lamb(arguments, compiled):
    expected = trained(optim.lamb(RATE, rules=RULES, **arguments), compiled=compiled)
    actual = trained(lamb_of_links(**arguments), compiled=compiled)
    assert_same(actual, expected, ROUNDING if compiled else 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_links_of_lamb_in_other_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        expected = trained(optim.lamb(RATE, rules=RULES), dtype)
        assert_same(trained(optim.in_float32(lamb_of_links()), dtype), expected)
        if dtype == "bfloat16":  # rounded between the links
            assert not np.array_equal(trained(lamb_of_links(), dtype)["stack"], expected["stack"])


def test_the_links_of_lamb_with_a_schedule_of_decay_and_bounds():
    bounds = {"phi_bounds": (0.5, 2.0), "ratio_bounds": (0.1, 3.0), "norm": "l1"}
    expected = trained(optim.lamb(RATE, weight_decay=lambda t: 0.1 * t, rules=RULES, **bounds))
    assert_same(trained(lamb_of_links(lambda t: 0.1 * t, ratio=bounds)), expected, ROUNDING)


def test_decay_before_the_moments_is_a_link_in_front():
    tx = optax.chain(
        optim.add_decayed_weights(0.1, RULES),
        optim.scale_by_lamb(rules=RULES),
        optim.scale_by_trust_ratio(RULES),
        optax.scale_by_learning_rate(RATE),
    )
    expected = trained(optim.lamb(RATE, weight_decay=0.1, decay="gradient", rules=RULES))
    assert_same(trained(tx), expected)


def test_alone_it_is_adam():
    actual = trained(optax.chain(optim.scale_by_lamb(eps=1e-8), optax.scale(-0.1)), "float32")
    expected = trained(optax.adam(0.1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual, expected)


@pytest.mark.parametrize("arguments", [{}, {"cautious": True}], ids=str)
def test_the_links_of_lamb_on_shards_inside_shard_map(arguments):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    tree = {
        "kernel": rng.standard_normal((16, 3)),
        "stack": rng.standard_normal((16, 2, 5)),
        "bias": rng.standard_normal(3),
    }
    rules = [("stack", {"layer_axes": (1,)}), ("bias", {"adapt": False}), ("", {})]
    params = jax.tree.map(jnp.float32, tree)
    grads = jax.tree.map(lambda x: 0.1 * x[::-1], params)
    specs = {"kernel": P("data"), "stack": P("data"), "bias": P()}
    axis_name = {"kernel": "data", "stack": "data", "bias": None}.__getitem__

    def split(tx):
        return jax.jit(
            jax.shard_map(
                lambda p, g: runs.after(tx, p, [g, g, g])[0],
                mesh=mesh,
                in_specs=(specs, specs),
                out_specs=specs,
            )
        )(params, grads)

    actual = split(lamb_of_links(rules=rules, axis_name=axis_name, **arguments))
    assert_same(actual, split(optim.lamb(RATE, rules=rules, axis_name=axis_name, **arguments)))
    full, _ = runs.after(lamb_of_links(rules=rules, **arguments), params, [grads] * 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), actual, full)
    lost = split(lamb_of_links(rules=rules, **arguments))
    assert not np.allclose(lost["kernel"], full["kernel"], rtol=1e-4)


def test_the_ratios_of_the_links_are_those_of_lamb():
    def ratios(tx):
        params = jax.tree.map(jnp.float32, PARAMS)
        _, state = tx.update(jax.tree.map(jnp.float32, GRADS[0]), tx.init(params), params)
        return diagnostics.read(state)["ratios"]

    actual = ratios(lamb_of_links(collect=True))
    assert_same(actual, ratios(optim.lamb(RATE, rules=RULES, collect=True)))
    assert actual["stack"].shape == (3,) and len(set(actual["stack"].tolist())) == 3


@pytest.mark.parametrize(
    "momentum",
    some(
        [
            {},
            {"nesterov": True},
            {"dampening": 0.5, "dampen_first": False},
            {"momentum": 0.5, "momentum_dtype": "bfloat16"},
        ],
        ({}, {"nesterov": True}),
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "order, denominator, accumulate",
    [
        ("ratio momentum rate", "decayed", "adapted"),
        ("ratio rate momentum", "decayed", "steps"),
        ("momentum ratio rate", "momentum", "gradients"),
    ],
)
def test_the_links_of_lars_are_lars(order, denominator, accumulate, momentum):
    actual = trained(lars_of_links(order, **momentum))
    expected = trained(
        optim.lars(
            RATE,
            weight_decay=0.1,
            coefficient=0.01,
            denominator=denominator,
            accumulate=accumulate,
            rules=RULES,
            **momentum,
        )
    )
    if accumulate == "adapted":
        assert_same(actual, expected)
    else:  # `lars` multiplies ratio and rate first
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), actual, expected
        )


def test_the_orders_of_the_links_of_lars_differ():
    actual = [
        trained(lars_of_links(order))
        for order in ("ratio momentum rate", "ratio rate momentum", "momentum ratio rate")
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(actual[one]["kernel"], actual[other]["kernel"], rtol=1e-5)


@pytest.mark.parametrize(
    "base",
    [optax.scale_by_adam(), optax.scale_by_lion(), optax.scale_by_rms(), optax.trace(0.9)],
    ids=["adam", "lion", "rms", "trace"],
)
def test_a_trust_ratio_on_any_base_makes_each_layers_step_as_long_as_its_weights(base):
    params = jax.tree.map(jnp.float32, PARAMS)
    tx = optax.chain(base, optim.scale_by_trust_ratio(RULES), optax.scale_by_learning_rate(0.5))
    updates, _ = tx.update(jax.tree.map(jnp.float32, GRADS[0]), tx.init(params), params)
    norms = [np.linalg.norm(tree["stack"].reshape(3, -1), axis=1) for tree in (updates, params)]
    np.testing.assert_allclose(norms[0], 0.5 * norms[1], rtol=1e-6)
    plain, _ = base.update(jax.tree.map(jnp.float32, GRADS[0]), base.init(params), params)
    np.testing.assert_allclose(updates["bias"], -0.5 * plain["bias"], rtol=1e-6)


def test_cautious_has_no_meaning_for_complex_leaves():
    with pytest.raises(
        ValueError, match="cautious=True compares signs, .* parameter 'w' is complex"
    ):
        optim.scale_by_lamb(cautious=True).init({"w": jnp.ones(2, jnp.complex64)})


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: optim.scale_by_lamb(bias_correction="step"),
            "'step' must be one of moments, none",
        ),
        (
            lambda: optim.scale_by_lamb(nu_dtype="float16"),
            "nu_dtype=.* must have the range of float32",
        ),
        (lambda: optim.scale_by_lars(1.0), "momentum=1.0 must be at least 0 and below 1"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
