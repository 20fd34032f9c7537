"""Tests derivatives of updates with respect to weights, for learned optimizers and tuning.

At a leaf of zeros the l2 norm has no derivative; the derivative must be 0 there, and not NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import clipping, trust_ratio
from lamb_tpu.optim.factory import OPTIMIZERS
from lamb_tpu.optim.parameters import ParameterMetadata
from tests.marks import MAIN, some
from tests.optim.catalogue import PLAIN, TRANSFORMS, takes

OPTAX = [name for name in OPTIMIZERS if not takes(name, "collect")]
OPTAX += ["scale_by_adam, scale_by_trust_ratio"]  # this Adam is Optax's
OURS = {
    **{name: build for name, build in PLAIN.items() if name not in OPTAX},
    "lars, larc": TRANSFORMS["lars larc"],
    "lars, momentum": TRANSFORMS["lars lamb_paper"],
    "novograd, apex": TRANSFORMS["novograd apex"],
    "lamb, gradient": functools.partial(optim.lamb, decay="gradient", nesterov="both"),
    "lamb, linf": functools.partial(optim.lamb, norm="linf", decay="decoupled"),
    "lamb, l1": functools.partial(optim.lamb, norm="l1", phi_bounds=(0.1, 2.0), cautious=True),
    "novograd, linf": functools.partial(optim.novograd, norm="linf", amsgrad=True),
    "rmsprop_tf, centered": functools.partial(
        optim.rmsprop_tf,
        centered=True,
        initial_scale=0.0,
        eps_in_root=False,
        cautious=True,
        weight_decay=0.1,
    ),
    "adagrad_norm, layers": functools.partial(
        optim.adagrad_norm, per_layer=True, initial_norm=0.0, weight_decay=0.1
    ),
    "apollo, projecting": functools.partial(optim.apollo, rank=2, weight_decay=0.1),
}
CURVATURE = {"kernel": 0.5, "zero": 1.0, "still": 0.0, "dead": 0.0, "large": 1.0}


def weights(dtype=jnp.float32):
    """Returns weights: those of 'zero', 'large' and 'dead' are 0; 'still' and 'dead' have no gradient."""
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.standard_normal((4, 3)), dtype),
        "zero": jnp.zeros((4, 3), dtype),
        "still": jnp.ones(3, dtype),
        "dead": jnp.zeros((4, 3), dtype),
        "large": jnp.zeros((4, 1024), dtype),
    }


def after_an_update(tx, params):
    """Returns the sum of squares of the weights after an update on a quadratic."""
    grads = {name: 2.0 * CURVATURE[name] * (w - 1.0) for name, w in params.items()}
    updates, _ = tx.update(grads, tx.init(params), params)
    return sum(jnp.sum(w * w) for w in optax.apply_updates(params, updates).values())


@pytest.mark.parametrize("name", some(OURS, (*MAIN, "novograd")))
def test_are_finite_at_leaves_of_zeros(name):
    tx, params = OURS[name](0.1), weights()
    actual = jax.jit(jax.grad(functools.partial(after_an_update, tx)))(params)
    for leaf, slope in actual.items():
        assert np.isfinite(slope).all(), leaf
    assert np.any(actual["kernel"] != 0.0)


@pytest.mark.parametrize("name", ["lamb", "lars", "novograd", "adagrad_norm"])
def test_are_those_of_finite_differences(name):
    with jax.enable_x64(True):
        tx, params = OURS[name](0.1), weights(jnp.float64)
        value = jax.jit(functools.partial(after_an_update, tx))
        slope = jax.grad(value)(params)["kernel"][1, 2]
        ends = [
            value(params | {"kernel": params["kernel"].at[1, 2].add(change)})
            for change in (-1e-6, 1e-6)
        ]
        np.testing.assert_allclose(slope, (ends[1] - ends[0]) / 2e-6, rtol=1e-6)


def test_of_l2_norms_are_zero_at_zero_and_values_are_those_of_sqrt():
    zeros, metadata = jnp.zeros((2, 3)), ParameterMetadata(layer_axes=(0,))
    slope = jax.grad(lambda w: trust_ratio.leaf_norm(w, metadata).sum())(zeros)
    np.testing.assert_array_equal(slope, 0.0)
    np.testing.assert_array_equal(jax.grad(clipping.global_norm)({"w": zeros})["w"], 0.0)
    values = jnp.asarray([0.0, 1e-45, 2.0, jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(jax.jit(trust_ratio.root)(values), jax.jit(jnp.sqrt)(values))
    assert jax.hessian(trust_ratio.root)(4.0) == -1 / 32
    assert jnp.isnan(jax.grad(trust_ratio.root)(jnp.nan))


@pytest.mark.long
@pytest.mark.parametrize("name", ["lamb", "lars", "novograd"])
def test_inside_shard_map_are_those_of_one_device(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "data")

    def slopes(axis_name, params):
        tx = PLAIN[name](0.1, axis_name=axis_name)

        def value(params):
            updates, _ = tx.update(params, tx.init(params), params)
            total = sum(jnp.sum(u * u) for u in updates.values())
            return jax.lax.psum(total, axis_name) if axis_name else total

        return jax.grad(value)(params)

    params = {"w": jnp.arange(1.0, 65.0).reshape(4, 16), "zero": jnp.zeros((4, 8))}
    split = jax.jit(
        jax.shard_map(functools.partial(slopes, "data"), mesh=mesh, in_specs=spec, out_specs=spec)
    )(params)
    full = slopes(None, params)
    for leaf, expected in full.items():
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(split[leaf], expected, rtol=1e-4, atol=1e-6)
