"""Tests clipping by the global norm: numbers, dtypes, non-finite values, and shards."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

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
        np.testing.assert_array_equal(clipped["a"], GRADS["a"])  # unchanged


def test_gradients_of_zero_stay_zero():
    with jax.debug_nans(True):
        clipped = _clip({"a": jnp.zeros(3)}, 1.0)
    np.testing.assert_array_equal(clipped["a"], np.zeros(3))
    assert _clip({}, 1.0) == {}


def test_non_finite_gradients_propagate():
    clipped = _clip({"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}, 1.0)
    assert all(jnp.isnan(leaf).all() for leaf in clipped.values())
    clipped = _clip({"a": jnp.array([1.0, jnp.inf]), "b": jnp.ones(2)}, 1.0)
    np.testing.assert_array_equal(clipped["a"], [0.0, np.nan])
    np.testing.assert_array_equal(clipped["b"], [0.0, 0.0])


@pytest.mark.parametrize("dtype, size", [("float16", 3e4), ("bfloat16", 1e15)])
def test_narrow_dtypes_do_not_overflow_and_stay(dtype, size):
    clipped = _clip({"a": jnp.full((64,), size, dtype), "b": jnp.zeros(2)}, 8.0)
    assert clipped["a"].dtype == dtype
    np.testing.assert_allclose(np.float32(clipped["a"]), 1.0, rtol=5e-3)


def test_float64_is_clipped_in_float64():
    with jax.enable_x64(True):
        clipped = _clip({"a": jnp.array([3.0, 4.0], "float64")}, 1.0)
        np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-15)


def test_inside_shard_map_the_norm_is_global():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng, spec = np.random.default_rng(0), PartitionSpec("data")
    grads = {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for name, shape in {"a": (16, 3), "b": (8,)}.items()
    }

    def mapped(axis_name):
        clip = functools.partial(_clip, max_norm=0.5, axis_name=axis_name)
        return jax.jit(jax.shard_map(clip, mesh=mesh, in_specs=spec, out_specs=spec))(grads)

    expected = _clip(grads, 0.5)
    for name, actual in mapped("data").items():
        np.testing.assert_allclose(actual, expected[name], rtol=2e-5, atol=1e-7)
    assert not np.allclose(mapped(None)["a"], expected["a"], rtol=0.05)
    norm = math.sqrt(sum((np.float64(g) ** 2).sum() for g in grads.values()))
    np.testing.assert_allclose(expected["a"], 0.5 / norm * grads["a"], rtol=1e-6)


def test_an_axis_that_is_not_bound_is_an_error():
    with pytest.raises(ValueError, match="axis_name='data' is not bound here"):
        _clip(GRADS, 1.0, axis_name="data")


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), None, "1"])
def test_bad_arguments(max_norm):
    with pytest.raises(ValueError, match=f"clip_global_norm: max_norm={max_norm!r}"):
        clipping.clip_global_norm(max_norm)
