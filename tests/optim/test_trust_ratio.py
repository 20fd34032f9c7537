"""Tests the layerwise trust ratio: stacks, shards, zeros, narrow dtypes, and norms other than l2."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import trust_ratio
from lamb_tpu.optim.presets import preset

LAYERWISE = {
    "scale_by_trust_ratio": optim.scale_by_trust_ratio,
    "lamb": functools.partial(optim.lamb, 0.1),
    "lars": functools.partial(optim.lars, 0.1),
    "lars lamb_paper": functools.partial(optim.lars, 0.1, **preset("lars", "lamb_paper")),
}


@pytest.mark.parametrize("name", LAYERWISE)
def test_stacked_layers_have_separate_ratios(name):
    """Four stacked layers with ratios of 1 : 10 : 100 : 1000 equal four separate layers."""
    rng = np.random.default_rng(0)
    scale = np.array([1.0, 10.0, 100.0, 1000.0])[:, None, None]
    stack = jnp.asarray(rng.choice([-1.0, 1.0], (4, 3, 5)) * scale, jnp.float32)
    grads = [jnp.asarray(rng.choice([-1.0, 1.0], (4, 3, 5)), jnp.float32) for _ in range(2)]
    unrolled = _run(
        LAYERWISE[name](collect=True),
        {str(i): stack[i] for i in range(4)},
        [{str(i): grad[i] for i in range(4)} for grad in grads],
    )
    stacked = _run(
        LAYERWISE[name](rules=[("", {"layer_axes": (0,)})], collect=True),
        {"stack": stack},
        [{"stack": grad} for grad in grads],
    )
    one = _run(LAYERWISE[name](collect=True), {"stack": stack}, [{"stack": g} for g in grads])
    for i in range(4):
        np.testing.assert_allclose(stacked[0]["stack"][i], unrolled[0][str(i)], rtol=1e-6)
        np.testing.assert_allclose(stacked[1]["stack"][i], unrolled[1][str(i)], rtol=1e-6)
    assert stacked[1]["stack"].shape == (4,)
    assert not np.allclose(one[0]["stack"], stacked[0]["stack"], rtol=0.1)


def test_ratios_of_a_stack():
    params = {"stack": jnp.asarray([[1.0], [10.0], [100.0], [1000.0]]) * jnp.ones((4, 15))}
    grads = [{"stack": jnp.ones((4, 15))}]
    per_layer = optim.scale_by_trust_ratio([("", {"layer_axes": (0,)})], collect=True)
    ratios = _run(per_layer, params, grads)[1]["stack"]
    np.testing.assert_allclose(ratios, [1.0, 10.0, 100.0, 1000.0], rtol=1e-6)
    ratio = _run(optim.scale_by_trust_ratio(collect=True), params, grads)[1]["stack"]
    np.testing.assert_allclose(ratio, math.sqrt(1010101 / 4), rtol=1e-6)  # 502.5 for all layers


@pytest.mark.parametrize(
    "layer_axes, shape", [((1,), (5,)), ((0, 2), (4, 3)), ((0, 1, 2), (4, 5, 3))]
)
def test_any_axes_can_stack_layers(layer_axes, shape):
    rng = np.random.default_rng(0)
    weights, update = rng.standard_normal((2, 4, 5, 3))
    tx = optim.scale_by_trust_ratio([("", {"layer_axes": layer_axes})], collect=True)
    params = {"w": jnp.asarray(weights, jnp.float32)}
    state = tx.init(params)
    assert state.diagnostics.ratios["w"].shape == shape
    updates, state = tx.update({"w": jnp.asarray(update, jnp.float32)}, state, params)
    reduced = tuple(axis for axis in range(3) if axis not in layer_axes)
    norms = [np.sqrt((x**2).sum(reduced)) for x in (weights, update)]
    np.testing.assert_allclose(state.diagnostics.ratios["w"], norms[0] / norms[1], rtol=1e-5)
    ratio = np.expand_dims(norms[0] / norms[1], reduced)
    np.testing.assert_allclose(updates["w"], ratio * update, rtol=1e-5)


@pytest.mark.parametrize("name", LAYERWISE)
def test_shards(name):
    """Tests a split tensor under jit, and inside shard_map with and without `axis_name`."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(np.exp(rng.standard_normal((16, 6))), jnp.float32)}
    grads = [{"w": jnp.asarray(rng.standard_normal((16, 6)), jnp.float32)} for _ in range(2)]
    grads = jax.tree.map(lambda grad, param: grad * param**2, grads, [params, params])
    expected, _ = _run(LAYERWISE[name](), params, grads)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    sharded, _ = _run(
        LAYERWISE[name](), *jax.device_put((params, grads), sharding), transform=jax.jit
    )
    assert sharded["w"].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(sharded["w"], expected["w"], rtol=1e-5)

    def mapped(axis_name):
        def both(params, grads):
            return _run(LAYERWISE[name](axis_name=axis_name), params, grads)[0]

        spec = PartitionSpec("data")
        return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(
            params, grads
        )

    np.testing.assert_allclose(mapped("data")["w"], expected["w"], rtol=1e-5)
    assert not np.allclose(mapped(None)["w"], expected["w"], rtol=0.05)


@pytest.mark.optimized
@pytest.mark.parametrize("spec", [("data", None), (None, "data")])
def test_shards_of_a_large_leaf_under_jit(spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    leaf = jnp.asarray(np.random.default_rng(0).standard_normal((64, 256)), jnp.float32)
    norm = jax.jit(lambda x: trust_ratio.leaf_norm(x, optim.ParameterMetadata()))
    leaf = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
    assert "all-gather" not in norm.lower(leaf).compile().as_text()
    value = norm(leaf)
    np.testing.assert_allclose(value[0, 0], np.linalg.norm(np.float64(leaf)), rtol=1e-6)


@pytest.mark.optimized
def test_windowed_sums_are_for_the_cpu_alone():
    traced = jax.jit(lambda x: trust_ratio.leaf_norm(x, optim.ParameterMetadata())).trace(
        jax.ShapeDtypeStruct((64, 256), jnp.float32)
    )
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu")}
    assert "64x32x8" in text["cpu"]
    assert "64x32x8" not in text["tpu"]
    assert "conditional" not in traced.lower().compile().as_text()


@pytest.mark.parametrize("norm", ["l1", "linf"])
def test_other_norms_over_shards(norm):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    leaf = jnp.arange(32.0).reshape(16, 2) - 20.0
    spec = PartitionSpec("data")
    value = jax.shard_map(
        lambda x: trust_ratio.leaf_norm(x, optim.ParameterMetadata(), norm, "data"),
        mesh=mesh,
        in_specs=spec,
        out_specs=PartitionSpec(),
    )(leaf)
    order = {"l1": 1, "linf": np.inf}[norm]
    np.testing.assert_allclose(value[0, 0], np.linalg.norm(leaf.ravel(), order))


def test_a_large_leaf_replicated_in_shard_map_keeps_its_ratio():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.full((64, 64), 2.0)}
    updates, _ = jax.jit(
        jax.shard_map(
            lambda p: _run(optim.scale_by_trust_ratio(axis_name="data"), p, [{"w": p["w"] / 4}]),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )
    )(params)
    np.testing.assert_allclose(updates["w"], params["w"], rtol=1e-6)


def test_an_axis_that_is_not_bound_is_an_error():
    tx = optim.scale_by_trust_ratio(axis_name="data")
    params = {"w": jnp.ones(2)}
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match="axis_name='data' is not bound here"):
            update(params, tx.init(params), params)
    for norm in trust_ratio.NORMS:
        with pytest.raises(ValueError, match=r"axis_name=\('x', 'y'\) is not bound here"):
            trust_ratio.leaf_norm(params["w"], optim.ParameterMetadata(), norm, ("x", "y"))


@pytest.mark.parametrize(
    "given, actual",
    [
        (None, None),
        ("x", "x"),
        (("x", "y"), ("x", "y")),
        ((), ()),
        (lambda path: {"a/b": ("x",)}[path], ("x",)),
        (lambda path: None, None),
    ],
)
def test_axes_of_a_leaf(given, actual):
    assert trust_ratio.axes_of(given, "a/b") == actual


@pytest.mark.parametrize("given", [["x"], ("x", None), 1])
def test_invalid_mesh_axes(given):
    with pytest.raises(
        ValueError, match="axis_name=.* must be a mesh axis, a tuple of mesh axes, "
    ):
        optim.scale_by_trust_ratio(axis_name=given)
    params, tx = {"w": jnp.ones(2)}, optim.scale_by_trust_ratio(axis_name=lambda path: given)
    with pytest.raises(ValueError, match="for the parameter 'w', axis_name=.* must be a mesh axis"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("zero_ratio", [1.0, 0.0, 0.5])
def test_a_norm_of_zero_gives_the_zero_ratio(zero_ratio):
    tx = optim.scale_by_trust_ratio(
        coefficient=3.0, phi_bounds=(0.5, 9.0), zero_ratio=zero_ratio, collect=True
    )
    params = {"zero": jnp.zeros(3), "both": jnp.zeros(3), "still": jnp.ones(3)}
    grads = {"zero": jnp.ones(3), "both": jnp.zeros(3), "still": jnp.zeros(3)}
    with jax.debug_nans(True):
        updates, state = tx.update(grads, tx.init(params), params)
    assert all(ratio == zero_ratio for ratio in state.diagnostics.ratios.values())
    np.testing.assert_array_equal(updates["zero"], zero_ratio * np.ones(3))
    np.testing.assert_array_equal(updates["still"], np.zeros(3))


@pytest.mark.parametrize("dtype, size", [(jnp.float16, 3e4), (jnp.bfloat16, 1e15)])
def test_norms_of_narrow_dtypes_do_not_overflow(dtype, size):
    # 64 values of 3e4: in float16 a single square is infinite. 5,120 values use the windowed sum.
    for count in (64, 5120):
        params = {"w": jnp.full((count,), size, dtype)}
        updates = {"w": jnp.full((count,), 0.5, dtype)}
        tx = optim.scale_by_trust_ratio(coefficient=1e-3, collect=True)
        scaled, state = tx.update(updates, tx.init(params), params)
        assert scaled["w"].dtype == dtype
        np.testing.assert_allclose(state.diagnostics.ratios["w"], size * 2e-3, rtol=5e-3)
        np.testing.assert_allclose(np.float32(scaled["w"]), size * 1e-3, rtol=1e-2)


def test_small_terms_are_not_lost_in_bfloat16():
    norm = trust_ratio.leaf_norm(jnp.ones(10_000, jnp.bfloat16), optim.ParameterMetadata())
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 100.0)  # a bfloat16 sum of ones stops at 256


@pytest.mark.parametrize(
    "bounds, expected",
    [((0.0, math.inf), 5.0), ((0.0, 2.0), 2.0), ((7.0, 8.0), 7.0), ((1.0, 9.0), 5.0)],
)
def test_phi_bounds_the_norm_of_the_weights(bounds, expected):
    ratio = trust_ratio.LayerRatio(phi_bounds=bounds).of_norms(jnp.float32(5.0), jnp.float32(1.0))
    assert float(ratio) == expected


@pytest.mark.parametrize(
    "bounds, expected",
    [((0.0, math.inf), 10.0), ((0.01, 4.0), 4.0), ((12.0, 13.0), 12.0), ((1.0, 11.0), 10.0)],
)
def test_ratio_bounds_bound_the_ratio_and_not_the_zero_ratio(bounds, expected):
    tx = optim.scale_by_trust_ratio(
        coefficient=2.0, ratio_bounds=bounds, zero_ratio=0.001, collect=True
    )
    params = {"w": jnp.array([3.0, 4.0]), "zero": jnp.zeros(2)}
    grads = {"w": jnp.array([1.0, 0.0]), "zero": jnp.ones(2)}
    updates, ratios = _run(tx, params, [grads])
    assert float(ratios["w"]) == expected
    np.testing.assert_array_equal(updates["w"], [expected, 0.0])
    np.testing.assert_allclose(updates["zero"], [0.001, 0.001], rtol=1e-6)


def test_a_norm_that_is_not_a_number_makes_the_ratio_so():
    one, nan = jnp.float32(1.0), jnp.float32(jnp.nan)
    for norms in ((one, nan), (nan, one), (nan, nan)):
        assert jnp.isnan(trust_ratio.LayerRatio(ratio_bounds=(0.01, 10.0)).of_norms(*norms))


def test_diagnostics():
    tx = optim.scale_by_trust_ratio([("", {"layer_axes": (0,)})], collect=True)
    params = {"w": jnp.array([[3.0, 4.0], [6.0, 8.0]])}
    state = tx.init(params)
    diagnostics = [np.asarray(tree["w"]) for tree in state.diagnostics]
    np.testing.assert_array_equal(diagnostics, [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    _, state = tx.update({"w": jnp.array([[2.0, 0.0], [0.0, 5.0]])}, state, params)
    np.testing.assert_array_equal(state.diagnostics.ratios["w"], [2.5, 2.0])
    np.testing.assert_array_equal(state.diagnostics.update_norms["w"], [5.0, 10.0])
    np.testing.assert_array_equal(state.diagnostics.weight_norms["w"], [5.0, 10.0])


def test_means():
    leaf = jnp.arange(24.0).reshape(2, 3, 4)
    mean = trust_ratio.leaf_mean(leaf, optim.ParameterMetadata(layer_axes=(1,)))
    np.testing.assert_allclose(mean, np.arange(24.0).reshape(2, 3, 4).mean((0, 2), keepdims=True))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mean = jax.shard_map(
        lambda x: trust_ratio.leaf_mean(x, optim.ParameterMetadata(), "data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )(jnp.arange(32.0).reshape(16, 2))
    np.testing.assert_allclose(mean, [[15.5]])


@pytest.mark.parametrize("norm, expected", [("l2", 5.0), ("l1", 7.0), ("linf", 4.0)])
def test_norms(norm, expected):
    value = trust_ratio.leaf_norm(jnp.array([3.0, -4.0]), optim.ParameterMetadata(), norm)
    assert float(value[0]) == expected


def test_ratios_cost_nothing_when_they_are_not_collected():
    params = {"w": jnp.ones((2, 2))}
    for make in LAYERWISE.values():
        tx = make()
        state = tx.init(params)
        assert state.diagnostics is None
        assert tx.update(params, state, params)[1].diagnostics is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"norm": "max"}, "norm='max' must be one of l2, l1, linf"),
        ({"phi_bounds": (1.0,)}, r"phi_bounds=\(1.0,\)"),
        ({"phi_bounds": (-1.0, 1.0)}, r"phi_bounds=\(-1.0, 1.0\)"),
        ({"ratio_bounds": (2.0, 1.0)}, r"ratio_bounds=\(2.0, 1.0\) must be .* 0 <= lower <= upper"),
        ({"rules": [("(", {})]}, r"the rule '\(' is not a valid regular expression"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.scale_by_trust_ratio(**arguments)


def _run(tx, params, grads, transform=lambda update: update):
    """Returns the last updates, and the last ratios if collected."""
    state = tx.init(params)
    update = transform(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return updates, state.diagnostics and state.diagnostics.ratios
