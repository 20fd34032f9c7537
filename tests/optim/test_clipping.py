"""Clipping by the global norm: numbers, dtypes, what is not finite, and shards."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import clipping

GRADS = {"a": jnp.array([[2.0, -1.0], [2.0, 0.0]]), "b": jnp.array(4.0)}  # the norm is 5


def _clip(grads, max_norm, **arguments):
    tx = clipping.clip_global_norm(max_norm, **arguments)
    return tx.update(grads, tx.init(grads))[0]


@pytest.mark.parametrize(
    "max_norm, scale", [(1.0, 0.2), (4.999, 0.9998), (5.0, 1.0), (5.001, 1.0), (math.inf, 1.0)]
)
def test_scale(max_norm, scale):
    clipped = jax.jit(lambda grads: _clip(grads, max_norm))(GRADS)
    for name, grad in GRADS.items():
        np.testing.assert_allclose(clipped[name], scale * grad, rtol=1e-6)
    if scale == 1.0:
        np.testing.assert_array_equal(clipped["a"], GRADS["a"])  # not touched at all


def test_gradients_of_zero_stay_zero():
    with jax.debug_nans(True):
        clipped = _clip({"a": jnp.zeros(3)}, 1.0)
    np.testing.assert_array_equal(clipped["a"], np.zeros(3))
    assert _clip({}, 1.0) == {}


def test_what_is_not_finite_is_not_hidden():
    clipped = _clip({"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}, 1.0)
    assert all(jnp.isnan(leaf).all() for leaf in clipped.values())
    clipped = _clip({"a": jnp.array([1.0, jnp.inf]), "b": jnp.ones(2)}, 1.0)
    np.testing.assert_array_equal(clipped["a"], [0.0, np.nan])
    np.testing.assert_array_equal(clipped["b"], [0.0, 0.0])


@pytest.mark.parametrize("dtype, size", [("float16", 3e4), ("bfloat16", 1e15)])
def test_narrow_dtypes_do_not_overflow_and_are_kept(dtype, size):
    clipped = _clip({"a": jnp.full((64,), size, dtype), "b": jnp.zeros(2)}, 8.0)
    assert clipped["a"].dtype == dtype
    np.testing.assert_allclose(np.float32(clipped["a"]), 1.0, rtol=5e-3)


def test_float64_is_clipped_in_float64():
    with jax.enable_x64(True):
        clipped = _clip({"a": jnp.array([3.0, 4.0], "float64")}, 1.0)
        np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-15)


@pytest.mark.parametrize("transform", ["clip_global_norm", "lamb"])
def test_inside_shard_map_the_norm_is_that_of_whole_tensors(transform):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    shapes = {"a": (16, 3), "b": (8,)}
    grads, params = (
        {
            name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
            for name, shape in shapes.items()
        }
        for _ in range(2)
    )

    def update(grads, params, axis_name=None):
        if transform == "lamb":
            # With decay in the gradient the scale of the gradients shows in the update.
            tx = optim.lamb(
                0.1, decay="gradient", weight_decay=1.0, clip_global_norm=0.5, axis_name=axis_name
            )
        else:
            tx = clipping.clip_global_norm(0.5, axis_name)
        return tx.update(grads, tx.init(params), params)[0]

    def mapped(axis_name):
        spec = PartitionSpec("data")
        return jax.jit(
            jax.shard_map(
                lambda grads, params: update(grads, params, axis_name),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
            )
        )(grads, params)

    expected = update(grads, params)
    for name in shapes:
        np.testing.assert_allclose(mapped("data")[name], expected[name], rtol=2e-5, atol=1e-7)
    assert not np.allclose(mapped(None)["a"], expected["a"], rtol=0.05)
    if transform == "clip_global_norm":
        norm = math.sqrt(sum((np.float64(g) ** 2).sum() for g in grads.values()))
        np.testing.assert_allclose(expected["a"], 0.5 / norm * grads["a"], rtol=1e-6)


def test_an_axis_that_is_not_bound_is_an_error():
    with pytest.raises(ValueError, match="axis_name 'data' is not bound here"):
        _clip(GRADS, 1.0, axis_name="data")


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), None, "1"])
def test_bad_arguments(max_norm):
    with pytest.raises(ValueError, match=f"clip_global_norm must be above 0.*not {max_norm!r}"):
        clipping.clip_global_norm(max_norm)
