"""Tests the construction of optimizers by name, with common arguments and presets."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import rounding
from lamb_tpu.optim.factory import OPTIMIZERS, make_optimizer

PARAMS = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.array([1.0])}
GRADS = {"kernel": jnp.array([0.5, -1.0]), "bias": jnp.array([2.0])}


def assert_same(tx, reference, params=PARAMS, grads=GRADS):
    state, expected = tx.init(params), reference.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        wanted, expected = reference.update(grads, expected, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, wanted)


@pytest.mark.parametrize(
    "config, reference",
    [
        ({"name": "sgd"}, optax.sgd(0.1)),
        (
            {"name": "sgd", "weight_decay": 0.5},
            optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)),
        ),
        ({"name": "momentum", "momentum": 0.8}, optax.sgd(0.1, 0.8)),
        ({"name": "nesterov"}, optax.sgd(0.1, 0.9, nesterov=True)),
        ({"name": "adam", "eps": 1e-3}, optax.adam(0.1, eps=1e-3)),
        (
            {"name": "adam", "clip_global_norm": 1.0},
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        ),
        ({"name": "sgd", "clip_global_norm": None}, optax.sgd(0.1)),
        (
            {"name": "adamw", "weight_decay": 0.3, "rules": "no_bias_no_norm"},
            optax.adamw(0.1, weight_decay=0.3, mask={"kernel": True, "bias": False}),
        ),
        ({"name": "adagrad", "initial_accumulator_value": 0.2}, optax.adagrad(0.1, 0.2)),
        ({"name": "lamb", "b1": 0.8}, optim.lamb(0.1, b1=0.8)),
        ({"name": "lars", "denominator": "decayed"}, optim.lars(0.1, denominator="decayed")),
        (
            {"name": "lamb", "preset": "author", "weight_decay": 0.5},
            optim.lamb(0.1, bias_correction="none", weight_decay=0.5, clip_global_norm=1.0),
        ),
        (
            {"name": "lamb", "preset": "author", "clip_global_norm": None},
            optim.lamb(0.1, bias_correction="none", weight_decay=0.01),
        ),
        ({"name": "lars", "preset": None}, optim.lars(0.1)),
    ],
)
def test_by_name(config, reference):
    assert_same(make_optimizer(config, 0.1), reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_name_is_a_function_of_the_package(name):
    assert callable(getattr(optim, name)) and name in optim.__all__
    tx = getattr(optim, name)(0.1)
    assert isinstance(tx, optax.GradientTransformation)
    assert_same(tx, make_optimizer({"name": name}, 0.1))


STATIC = {
    "apollo": ("rank",),
    "zero_one_adam": (
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_injected_hyperparams(name):
    build, static = getattr(optim, name), STATIC.get(name, ())
    if static:
        tx = optax.inject_hyperparams(build)(learning_rate=0.1)
        with pytest.raises(ValueError, match=f"{static[0]}.*static_args=.*{static[-1]}"):
            tx.init(PARAMS)
    tx = optax.inject_hyperparams(build, static_args=static)(learning_rate=0.1)
    state = tx.init(PARAMS)
    # Under jit all other numbers are traced.
    updates, _ = jax.eval_shape(tx.update, GRADS, state, PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_table_of_rules_serves_all(name):
    rules = [["bias", {"decay": False, "adapt": False}], ["", {"layer_axes": []}]]
    config = {"name": name, "rules": rules}
    if name == "adagrad_norm":
        config["per_layer"] = True  # else the kernel's decay changes the global norm
    configs = [{**config, "weight_decay": decay} for decay in (0.0, 0.5)]
    plain, decayed = (
        tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]
        for tx in (make_optimizer(config, 0.1) for config in configs)
    )
    np.testing.assert_array_equal(plain["bias"], decayed["bias"])
    assert not np.allclose(plain["kernel"], decayed["kernel"], rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_comes_before_anything_else(name):
    # The norm of the gradients is 2.2913, so clipping at 1 divides the gradients by 2.2913.
    norm = np.sqrt(0.25 + 1.0 + 4.0)
    clipped = make_optimizer({"name": name, "clip_global_norm": 1.0}, 0.1)
    plain = make_optimizer({"name": name}, 0.1)
    actual, _ = clipped.update(GRADS, clipped.init(PARAMS), PARAMS)
    scaled = jax.tree.map(lambda g: g / norm, GRADS)
    expected, _ = plain.update(scaled, plain.init(PARAMS), PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


@pytest.mark.parametrize("name", ["sgd", "adagrad_norm", "lamb"])
def test_clipping_takes_the_norm_over_a_mesh_axis(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, grads = {"w": jnp.arange(1.0, 17.0)}, {"w": jnp.linspace(-2.0, 3.0, 16)}

    def first_update(tx, params, grads):
        return tx.update(grads, tx.init(params), params)[0]

    config = {"name": name, "clip_global_norm": 1.0}
    expected = first_update(make_optimizer(config, 0.1), params, grads)
    split = jax.shard_map(
        lambda p, g: first_update(make_optimizer({**config, "axis_name": "data"}, 0.1), p, g),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    np.testing.assert_allclose(split(params, grads)["w"], expected["w"], rtol=1e-6)


@pytest.mark.parametrize("name", ["lamb", "adamw"])
@pytest.mark.parametrize("value, seed", [(True, 0), (0, 0), (7, 7)])
def test_stochastic_rounding(name, value, seed):
    params, grads = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), t) for t in (PARAMS, GRADS))
    tx = make_optimizer({"name": name, "stochastic_rounding": value}, 0.001)
    inner = make_optimizer({"name": name, "stochastic_rounding": False}, 0.001)
    assert_same(tx, rounding.stochastic_rounding(inner, seed), params, grads)
    assert isinstance(tx.init(params), rounding.StochasticRoundingState)
    assert not isinstance(inner.init(params), rounding.StochasticRoundingState)


def test_stochastic_rounding_gets_the_mesh_axis():
    tx = make_optimizer({"name": "sgd", "stochastic_rounding": True, "axis_name": "x"}, 0.1)
    params = jnp.ones(2, jnp.bfloat16)  # plain SGD does not use an axis
    with pytest.raises(ValueError, match="axis_name='x' is not bound here"):
        tx.update(params, tx.init(params), params)


def test_rules_are_resolved_at_once_where_parameters_are_given():
    config = {"name": "sgd", "rules": [("kernel", {}), ("beta", {}), ("", {})]}
    shapes = jax.eval_shape(lambda: PARAMS)
    with pytest.raises(ValueError, match="the rule 'beta' matches no parameter"):
        make_optimizer(config, 0.1, shapes)
    make_optimizer(config, 0.1)
    make_optimizer({"name": "sgd"}, 0.1, shapes)
    with pytest.raises(ValueError, match="^agvm: no module matches the parameter 'bias'; add a"):
        make_optimizer(
            {"name": "sgd", "agvm": {"modules": [("a", "kern"), ("b", "el$")]}}, 0.1, shapes
        )
    with pytest.raises(ValueError, match="^agvm: second_moment returns second moments that do not"):
        make_optimizer({"name": "lion", "agvm": {**AGVM, "second_moment": True}}, 0.1, shapes)
    with pytest.raises(ValueError, match="^agvm: agvm cannot wrap schedule_free_adamw"):
        make_optimizer({"name": "schedule_free_adamw", "agvm": AGVM}, 0.1, shapes)


AGVM = {"modules": [("rest", "bias"), ("body", "")], "anchor": "body"}


def test_agvm():
    fields = {**AGVM, "interval": 1, "start": 0, "second_moment": True, "eps_root": 1e-6}
    tx = make_optimizer({"name": "adam", "b2": 0.9, "l2": 0.1, "agvm": fields}, 0.1, PARAMS)
    reference = optim.agvm(
        optim.add_l2(optax.adam(0.1, b2=0.9), 0.1, "all"),
        ["bias", ""],
        anchor=1,
        interval=1,
        start=0,
        second_moment=lambda state: state[0].nu,
        b2=0.9,
        eps_root=1e-6,
    )
    state, expected = tx.init(PARAMS), reference.init(PARAMS)
    for sign in (1.0, -1.0):
        halves = GRADS, {"kernel": jnp.array([0.1, -3.0]), "bias": sign * GRADS["bias"]}
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        updates, state = tx.update(mean, state, PARAMS, halves=halves)
        wanted, expected = reference.update(mean, expected, PARAMS, halves=halves)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)
    np.testing.assert_array_equal(state.factors, expected.factors)
    assert state.factors[1] == 1 and abs(state.factors[0] - 1) > 1e-3


@pytest.mark.parametrize(
    "config, message",
    [
        ({"name": "lambs"}, "name='lambs' is unknown; use one of lamb, lars"),
        ({}, "name=None is unknown"),
        ({"name": "lamb", "beta1": 0.9}, "lamb has no argument 'beta1'; use one of b1, b2, eps"),
        (
            {"name": "sgd", "learning_rate": 0.9},
            "sgd has no argument 'learning_rate'; use one of weight_decay, rules, clip_global_norm, "
            "axis_name, l2, l2_rules, agvm, stochastic_rounding, preset",
        ),
        ({"name": "sgd", "preset": "paper"}, "'sgd' has no presets, unlike .*lamb"),
        (
            {"name": "lamb", "preset": "papers"},
            "preset name='papers' is unknown; for lamb use one of paper, author",
        ),
        (
            {"name": "adam", "clip_global_norm": -1.0},
            "clip_global_norm: max_norm=-1.0 must be above 0",
        ),
        ({"name": "adam", "stochastic_rounding": -1}, "stochastic_rounding=-1 must be"),
        ({"name": "momentum", "rules": "none"}, "'none' is unknown"),
        ({"name": "momentum", "rules": [("a", {}), ("a", {})]}, "the rule 'a' is given twice"),
        ({"name": "lamb", "agvm": 3}, "agvm=3 must be a mapping with the key 'modules'"),
        (
            {"name": "lamb", "agvm": {**AGVM, "every": 5}},
            "^agvm.every is unknown; use one of modules, anchor, second_moment, interval, start",
        ),
        ({"name": "lamb", "agvm": {}}, r"^agvm.modules=\(\) must have at least two"),
        ({"name": "lamb", "agvm": {"modules": ["body"]}}, r"^agvm.modules=\['body'\] must be"),
        (
            {"name": "lamb", "agvm": {**AGVM, "anchor": "neck"}},
            "^agvm.anchor='neck' must be one of rest, body",
        ),
        (
            {"name": "lamb", "agvm": {"modules": [("a", "("), ("b", "")]}},
            r"agvm.modules has '\(', which is not a valid regular",
        ),
        (
            {"name": "lamb", "agvm": {**AGVM, "momentum": 1.0}},
            "^agvm: momentum=.* must be at least 0 and",
        ),
        (
            {"name": "lars", "agvm": {**AGVM, "second_moment": True}},
            "^agvm.second_moment=True needs an optimizer with the argument b2",
        ),
        (
            {"name": "lamb", "agvm": {**AGVM, "second_moment": 1}},
            "^agvm.second_moment=.* must be True or",
        ),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(config, 0.1)


NUMBERS = [
    (name, argument.name)
    for name, build in OPTIMIZERS.items()
    for argument in inspect.signature(build).parameters.values()
    if isinstance(argument.default, float) or argument.name == "learning_rate"
]


@pytest.mark.parametrize("name, argument", NUMBERS)
def test_bad_numbers_are_named(name, argument):
    values = [-0.5, float("nan")] + [1.5, 1.0] * (argument in ("b1", "b2", "momentum"))
    for value in values:
        with pytest.raises(ValueError, match=rf"{argument}={value} must be"):
            OPTIMIZERS[name](**{"learning_rate": 0.1, argument: value})


def test_the_config_does_not_change():
    config = {"name": "lamb", "preset": "author"}
    make_optimizer(config, 0.1)
    assert config == {"name": "lamb", "preset": "author"}
