"""Tests extra arguments of `update`: every transform accepts them, and wrappers pass them on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lamb_tpu import optim
from lamb_tpu.optim import chains, rounding
from tests.optim.catalogue import PLAIN, TRANSFORMS

PARAMS = {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3)}
GRADS = {"kernel": jnp.ones((4, 3)), "bias": jnp.full(3, 0.5)}


def by_value() -> optax.GradientTransformationExtraArgs:
    """Subtracts the extra argument `value` from every weight; rejects updates without this argument."""

    def update_fn(updates, state, params=None, *, value, **others):
        del params, others
        return jax.tree.map(lambda u: jnp.full_like(u, -value), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_takes_them_and_steps_as_without(name):
    tx = TRANSFORMS[name](0.1)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(PARAMS)
    plain = tx.update(GRADS, state, PARAMS)
    jax.tree.map(
        np.testing.assert_array_equal,
        tx.update(GRADS, state, PARAMS, value=jnp.float32(3.0), grad=GRADS),
        plain,
    )


@pytest.mark.parametrize("name", PLAIN)
def test_nnx_passes_them(name):
    def updated(**extra_args):
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, PLAIN[name](0.1), wrt=nnx.Param)
        optimizer.update(model, nnx.state(model, nnx.Param), **extra_args)
        return jax.tree.leaves(nnx.state(model, nnx.Param))

    jax.tree.map(np.testing.assert_array_equal, updated(value=jnp.float32(3.0)), updated())


@pytest.mark.parametrize(
    "wrapped",
    [
        rounding.stochastic_rounding(by_value()),
        chains.in_float32(by_value()),
        chains.under_rules(by_value(), "all"),
        optax.chain(chains.add_decayed_weights(0.1, "all"), by_value()),
        optim.add_l2(by_value(), 0.1, "all"),
        optax.chain(optim.clip_global_norm(1.0), optim.scale_by_trust_ratio(), by_value()),
    ],
    ids=[
        "stochastic_rounding",
        "in_float32",
        "under_rules",
        "add_decayed_weights",
        "add_l2",
        "chain",
    ],
)
def test_wrappers_pass_extra_arguments_on(wrapped):
    updates, _ = wrapped.update(GRADS, wrapped.init(PARAMS), PARAMS, value=jnp.float32(3.0))
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, -3.0), updates)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "momentum", "clip_global_norm": 1.0},
        {"name": "adam", "clip_global_norm": 1.0, "stochastic_rounding": True},
    ],
)
def test_a_config_passes_them_to_the_innermost(config, monkeypatch):
    inner = by_value()
    monkeypatch.setattr(optax, "sgd", lambda *args, **kwargs: inner)
    monkeypatch.setattr(optax, "adam", lambda *args, **kwargs: inner)
    tx = optim.make_optimizer(config, 0.1)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(3.0))
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, -3.0), updates)
