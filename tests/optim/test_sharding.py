"""Tests that states have the sharding of their parameters, and that updates do not depend on sharding.

Every transform takes five steps on one device, and the same steps under `jit` with shardings,
inside `shard_map`, inside `pmap` and on an Explicit mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from lamb_tpu import optim
from lamb_tpu.optim.sharding import state_sharding
from tests.marks import some
from tests.optim.catalogue import PLAIN, SPLITTING, takes
from tests.optim.runs import assert_close, assert_shardings, step_of

P = PartitionSpec
RATE = optim.warmup(0.1, 10, 2)
RULES = [("^layers/", {"layer_axes": (0,)}), ("", {})]
SHAPES = {
    "dense": {"kernel": (128, 64), "bias": (64,)},
    "layers": {"kernel": (4, 16, 8)},
    "narrow": (256, 16),  # two columns per device, fewer than any window of a sum
    "temperature": (),
}
SPECS = {
    "dense": {"kernel": P("data", "model"), "bias": P("model")},
    "layers": {"kernel": P("data", None, "model")},
    "narrow": P(None, ("data", "model")),
    "temperature": P(),
}
# Inside shard_map every leaf is split over `axis_name`, but not along stacked layers.
SPLIT_SHAPES = {"dense": {"kernel": (16, 8), "bias": (8,)}, "layers": {"kernel": (4, 16, 8)}}
SPLIT_SPECS = {
    "dense": {"kernel": P(None, "data"), "bias": P("data")},
    "layers": {"kernel": P(None, "data")},
}


def draw(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def build(name, **arguments):
    if takes(name, "collect"):
        arguments["collect"] = True
    rules = "all" if name == "adafactor" else RULES  # adafactor rejects stacks
    return PLAIN[name](RATE, rules=rules, **arguments)


def train(step, params, state, shapes, steps=5, place=lambda grads: grads):
    for seed in range(1, steps + 1):
        params, state = step(params, state, place(draw(shapes, seed)))
    return params, state


@functools.cache
def unsharded(name, split=False):
    shapes = SPLIT_SHAPES if split else SHAPES
    tx, params = build(name), draw(shapes, 0)
    return train(jax.jit(step_of(tx)), params, tx.init(params), shapes)


def mesh_of(kind, shape=(4, 2), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def named(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


@pytest.mark.long
@pytest.mark.parametrize("name", some(PLAIN))
def test_under_jit(name):
    tx, shardings = build(name), named(mesh_of(AxisType.Auto), SPECS)
    params = jax.device_put(draw(SHAPES, 0), shardings)
    state_shardings = state_sharding(tx, params, shardings)
    state = jax.jit(tx.init, out_shardings=state_shardings)(params)
    step = jax.jit(step_of(tx), out_shardings=(shardings, state_shardings))
    params, state = train(step, params, state, SHAPES, place=lambda g: jax.device_put(g, shardings))
    assert step._cache_size() == 1
    assert_shardings((params, state), (shardings, state_shardings))
    assert_close((params, state), unsharded(name))


@pytest.mark.long
@pytest.mark.parametrize("name", some(SPLITTING))
def test_inside_shard_map(name):
    mesh = mesh_of(AxisType.Auto, (8,), ("data",))

    def run(axis_name):
        tx, params = build(name, axis_name=axis_name), draw(SPLIT_SHAPES, 0)
        specs = (SPLIT_SPECS, state_sharding(tx, params, SPLIT_SPECS))
        step = jax.jit(
            jax.shard_map(
                step_of(tx),
                mesh=mesh,
                in_specs=(*specs, SPLIT_SPECS),
                out_specs=specs,
                # Without axis_name each shard has a local norm, so norms are not replicated.
                check_vma=axis_name is not None,
            )
        )
        return train(step, params, tx.init(params), SPLIT_SHAPES)

    expected = unsharded(name, split=True)
    assert_close(run("data"), expected)
    with pytest.raises(AssertionError):
        assert_close(run(None), expected, rtol=1e-2)


@pytest.mark.parametrize("name", SPLITTING)
def test_an_axis_that_is_not_bound(name):
    tx, params = build(name, axis_name="nowhere"), draw(SHAPES, 0)
    with pytest.raises(ValueError, match="axis_name='nowhere' is not bound here"):
        jax.jit(tx.update)(params, tx.init(params), params)


@pytest.mark.parametrize("name", some(PLAIN))
def test_inside_pmap_with_averaged_gradients(name):
    tx, params = build(name), draw(SHAPES, 0)

    def step(params, state, grads):
        return step_of(tx)(params, state, jax.lax.pmean(grads, "data"))

    def spread(grads):  # eight gradients with the given mean
        offsets = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
        return jax.tree.map(
            lambda g: g + offsets.reshape(-1, *(1,) * g.ndim) * jnp.ones_like(g), grads
        )

    step = jax.pmap(step, "data", in_axes=(None, None, 0), out_axes=None)
    actual = train(step, params, tx.init(params), SHAPES, place=spread)
    assert_close(actual, unsharded(name), rtol=1e-5)


# Muon is left out, because it needs full matrices on an Explicit mesh.
@pytest.mark.parametrize("name", some(name for name in PLAIN if name != "muon"))
def test_on_an_explicit_mesh(name):
    mesh = mesh_of(AxisType.Explicit)
    shardings = named(mesh, SPECS)
    with jax.set_mesh(mesh):
        tx, params = build(name), jax.device_put(draw(SHAPES, 0), shardings)
        state = tx.init(params)
        types = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, jax.jit(tx.init)(params)) == types
        assert_shardings(state, state_sharding(tx, params, shardings))
        step = jax.jit(step_of(tx))
        params, state = train(
            step, params, state, SHAPES, place=lambda g: jax.device_put(g, shardings)
        )
        assert jax.tree.map(jax.typeof, state) == types
        assert step._cache_size() == 1
    assert_close((params, state), unsharded(name))


def test_an_explicit_mesh_of_more_devices_than_are_here():
    # Like a step compiled for a pod: 64 columns over 64 devices.
    mesh = AbstractMesh((64,), ("data",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, P(None, "data"))
    with jax.sharding.use_abstract_mesh(mesh):
        params = {"kernel": jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=split)}
        tx = optim.lamb(0.1)
        updates, state = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    assert updates["kernel"].sharding == state.mu["kernel"].sharding == split


@pytest.mark.parametrize("name", some(SPLITTING))
def test_stacked_layers_equal_the_unrolled_model(name):
    # The ratios of the four layers are proportional to 1, 10, 100 and 1000.
    shapes = {"kernel": (4, 16, 8), "bias": (4, 8)}

    def scaled(seed):
        factor = 10.0 ** np.arange(4, dtype=np.float32)
        return (
            jax.tree.map(lambda x: x * factor.reshape(-1, *(1,) * (x.ndim - 1)), draw(shapes, seed))
            if seed == 0
            else draw(shapes, seed)
        )

    def unstacked(tree):
        return {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], tree) for i in range(4)}

    stacked, unrolled = (
        PLAIN[name](RATE, rules=rules) for rules in ([("", {"layer_axes": (0,)})], "all")
    )
    params, expected = scaled(0), unstacked(scaled(0))
    state, expected_state = stacked.init(params), unrolled.init(expected)
    step, expected_step = jax.jit(step_of(stacked)), jax.jit(step_of(unrolled))
    for seed in range(1, 6):
        params, state = step(params, state, scaled(seed))
        expected, expected_state = expected_step(expected, expected_state, unstacked(scaled(seed)))
    assert_close(unstacked(params), expected)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"dense": {"kernel": struct(16, 8), "bias": struct(8)}, "kernel": struct(4, 4)}
PARAMS_SPECS = {"dense": {"kernel": P("data"), "bias": P()}, "kernel": P(None, "data")}


def test_states_of_optax():
    tx = optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(learning_rate=RATE), 2)
    state = state_sharding(tx, PARAMS, PARAMS_SPECS)
    assert state.acc_grads == PARAMS_SPECS
    adam = state.inner_opt_state.inner_state[0]
    assert adam.mu == adam.nu == PARAMS_SPECS
    rest = state._replace(
        acc_grads=None, inner_opt_state=state.inner_opt_state._replace(inner_state=None)
    )
    assert set(jax.tree.leaves(rest)) == {P()}
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, PARAMS))


def test_masked_and_partitioned_states():
    labels = {"dense": {"kernel": "a", "bias": "b"}, "kernel": "b"}
    tx = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, labels)
    inner = state_sharding(tx, PARAMS, PARAMS_SPECS).inner_states
    assert inner["a"].inner_state[0].mu["dense"]["kernel"] == P("data")
    assert inner["b"].inner_state[0].trace["kernel"] == P(None, "data")
    assert inner["b"].inner_state[0].trace["dense"]["bias"] == P()


def test_factored_moments_are_replicated_and_reduced_ones_keep_common_axes():
    shapes, specs = {"w": struct(256, 512)}, {"w": P("data", "model")}
    factored = state_sharding(optax.scale_by_factored_rms(), shapes, specs)
    assert set(jax.tree.leaves(factored)) == {P()}
    adafactor = state_sharding(optax.adafactor(0.1), shapes, specs)
    assert jax.tree.structure(adafactor) == jax.tree.structure(
        jax.eval_shape(optax.adafactor(0.1).init, shapes)
    )

    reduced = optax.GradientTransformation(
        lambda p: {
            name: {"w": jnp.sum(p["w"], axis, keepdims=True)}
            for name, axis in (("rows", 1), ("columns", 0))
        },
        lambda u, s, p: (u, s),
    )
    assert state_sharding(reduced, shapes, specs) == {
        "rows": {"w": P("data")},
        "columns": {"w": P(None, "model")},
    }


def test_the_longest_path_decides():
    # The state's 'dense/kernel' also ends in 'kernel', the path of another parameter.
    state = state_sharding(optax.trace(0.9), PARAMS, PARAMS_SPECS)
    assert state.trace == PARAMS_SPECS


def test_keys_are_compared_as_keys():
    # The attribute 'count' differs from the dict key 'count', and index 0 from the dict key 0.
    state = (jnp.zeros(8), optax.ScaleByScheduleState(jnp.zeros(8)))
    for name, actual in (("count", {"count": P("data")}), (0, {0: P("data")})):
        tx = optax.GradientTransformation(lambda p: (*state, p), lambda g, s, p=None: (g, s))
        assert state_sharding(tx, {name: struct(8)}, P("data")) == (
            P(),
            optax.ScaleByScheduleState(P()),
            actual,
        )


def test_named_shardings_preserve_the_mesh_and_memory_kind():
    mesh = mesh_of(AxisType.Auto)
    sharding = NamedSharding(mesh, P("data"), memory_kind="unpinned_host")
    state = state_sharding(optax.adam(0.1), PARAMS, sharding)
    assert state[0].mu["dense"]["bias"] is sharding
    assert state[0].count == NamedSharding(mesh, P(), memory_kind="unpinned_host")


def test_arrays_on_one_device_and_bare_parameters():
    params = jnp.ones(3)
    state = state_sharding(optax.adam(0.1), params, params.sharding)
    assert set(jax.tree.leaves(state)) == {SingleDeviceSharding(jax.devices()[0])}
    assert state_sharding(optax.trace(0.9), params, P("data")).trace == P("data")
    assert state_sharding(optax.adam(0.1), {}, P("data"))[0].count == P()


@pytest.mark.parametrize(
    "sharding, message",
    [
        ({}, "params_sharding={} is empty"),
        ({"dense": P()}, "must have the structure of params or be a prefix"),
        ({**PARAMS_SPECS, "other": P()}, "must have the structure of params or be a prefix"),
        (
            {**PARAMS_SPECS, "kernel": P(None, None, "data")},
            r"\['kernel'\]=P.* has more entries than the parameter has axes; it has the shape \(4, 4\)",
        ),
        (
            {**PARAMS_SPECS, "kernel": "data"},
            "params_sharding.'kernel'.='data' must be a NamedSharding or a PartitionSpec",
        ),
    ],
)
def test_shardings_that_do_not_fit(sharding, message):
    with pytest.raises(ValueError, match=message):
        state_sharding(optax.adam(0.1), PARAMS, sharding)


def test_a_size_that_the_mesh_does_not_divide():
    sharding = NamedSharding(mesh_of(AxisType.Auto), P(("data", "model")))
    with pytest.raises(ValueError, match="the parameter 'kernel' cannot be split"):
        state_sharding(optax.adam(0.1), PARAMS, sharding)
