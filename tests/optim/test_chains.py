"""Tests transforms for chains: weight decay and rate factors by rules, and float32 arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import chains

PARAMS = {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.array([4.0]), "other": jnp.array([8.0])}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
RULES = [
    ("bias", {"decay": False, "rate_factor": 0.5}),
    ("other", {"decay_factor": 0.25}),
    ("", {}),
]


def test_decay_goes_by_the_rules():
    tx = optim.add_decayed_weights(0.5, RULES)
    updates, _ = tx.update(ZEROS, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["kernel"], [0.5, -1.0])
    np.testing.assert_array_equal(updates["bias"], [0.0])
    np.testing.assert_array_equal(updates["other"], [1.0])


def test_a_schedule_of_decay_gets_the_completed_updates():
    tx = optim.add_decayed_weights(lambda count: 1.0 + count)
    state, actual = tx.init(PARAMS), []
    for _ in range(3):
        updates, state = tx.update(ZEROS, state, PARAMS)
        actual.append(float(updates["bias"][0]))
    assert actual == [4.0, 8.0, 12.0]


def test_rates_go_by_the_rules():
    tx = optax.chain(optax.scale_by_learning_rate(0.5), optim.scale_by_rate_factors(RULES))
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["bias"], [-1.0])
    np.testing.assert_array_equal(updates["kernel"], [-0.5, 1.0])


def test_inner_transform_gets_float32():
    seen = []

    def update_fn(updates, state, params=None):
        seen.extend(leaf.dtype.name for leaf in jax.tree.leaves((updates, state, params)))
        return jax.tree.map(lambda u: u + 2.0**-9, updates), state

    inner = optax.GradientTransformation(lambda params: params, update_fn)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = optim.in_float32(optax.chain(inner, optax.scale(1.0)))
    updates, state = tx.update(params, tx.init(params), params)
    assert set(seen) == {"float32"} == {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"bfloat16"}


def test_a_state_of_another_transform_is_named():
    tx = optim.in_float32(optax.adam(0.1))
    with pytest.raises(ValueError, match="state=.* must be the state from this transform's init"):
        tx.update(PARAMS, optax.EmptyState(), PARAMS)


def test_an_inner_error_keeps_its_message():
    def update_fn(updates, state, params=None):
        raise ValueError("inner failed")

    tx = optim.in_float32(optax.GradientTransformation(optax.init_empty_state, update_fn))
    with pytest.raises(ValueError, match="inner failed"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_the_first_rejected_leaf_is_named():
    def problem(path, leaf, metadata):
        return f"no {path!r} here" if metadata.decay_factor < 1 else None

    with pytest.raises(ValueError, match="no 'other' here"):
        chains.reject_leaves(PARAMS, RULES, problem)
    chains.reject_leaves(PARAMS, RULES, lambda *_: None)
