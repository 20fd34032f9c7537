"""Optimizers by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.factory import OPTIMIZERS, make_optimizer

PARAMS = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.array([1.0])}
GRADS = {"kernel": jnp.array([0.5, -1.0]), "bias": jnp.array([2.0])}


@pytest.mark.parametrize("config, reference", [
    ({"name": "sgd"}, optax.sgd(0.1)),
    ({"name": "sgd", "weight_decay": 0.5},
     optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))),
    ({"name": "momentum", "momentum": 0.8}, optax.sgd(0.1, 0.8)),
    ({"name": "nesterov"}, optax.sgd(0.1, 0.9, nesterov=True)),
    ({"name": "adam", "eps": 1e-3}, optax.adam(0.1, eps=1e-3)),
    ({"name": "adamw", "weight_decay": 0.3, "rules": "no_bias_no_norm"},
     optax.adamw(0.1, weight_decay=0.3, mask={"kernel": True, "bias": False})),
    ({"name": "adagrad", "initial_accumulator_value": 0.2}, optax.adagrad(0.1, 0.2)),
    ({"name": "lamb", "b1": 0.8}, optim.lamb(0.1, b1=0.8)),
    ({"name": "lars", "coefficient": 0.1}, optim.lars(0.1, coefficient=0.1)),
    ({"name": "lars_lamb_paper", "weight_decay": 0.1},
     optim.lars_lamb_paper(0.1, weight_decay=0.1)),
])
def test_by_name(config, reference):
    tx = make_optimizer(config, 0.1)
    state, expected = tx.init(PARAMS), reference.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(GRADS, state, PARAMS)
        wanted, expected = reference.update(GRADS, expected, PARAMS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_table_of_rules_serves_all(name):
    rules = [["bias", {"decay": False, "adapt": False}], ["", {"layer_axes": []}]]
    configs = [{"name": name, "rules": rules, "weight_decay": decay} for decay in (0.0, 0.5)]
    plain, decayed = (
        tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]
        for tx in (make_optimizer(config, 0.1) for config in configs)
    )
    np.testing.assert_array_equal(plain["bias"], decayed["bias"])
    assert not np.allclose(plain["kernel"], decayed["kernel"], rtol=1e-4)


@pytest.mark.parametrize("config, message", [
    ({"name": "lambs"}, "name 'lambs' is unknown; known: lamb, lars, lars_lamb_paper, sgd, mom"),
    ({}, "name None is unknown"),
    ({"name": "lamb", "beta1": 0.9}, "lamb has no argument 'beta1'; known: b1, b2, eps"),
    ({"name": "sgd", "learning_rate": 0.9}, "sgd has no argument 'learning_rate'"),
    ({"name": "adamw", "weight_decay": -0.1}, "weight_decay must be at least 0, not -0.1"),
    ({"name": "momentum", "rules": "none"}, "'none' is no preset"),
])
def test_bad_configs(config, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(config, 0.1)


def test_the_config_is_left_as_it_was():
    config = {"name": "sgd"}
    make_optimizer(config, 0.1)
    assert config == {"name": "sgd"}
