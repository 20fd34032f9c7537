"""Tests the reading of diagnostics from any part of a state, by the parameters' paths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import diagnostics

PARAMS = {
    "dense": {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.array([2.0])},
    "layers": jnp.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]]),
}
RULES = [("^layers$", {"layer_axes": (0,)}), ("bias", {"adapt": False}), ("", {})]


def _after_one_update(tx):
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    updates, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    return updates, state


@pytest.mark.parametrize("optimizer", [optim.lamb, optim.lars])
def test_norms_are_those_of_weights_and_updates(optimizer):
    updates, state = _after_one_update(optimizer(0.1, rules=RULES, collect=True))
    actual = diagnostics.read(state)
    assert set(actual) == {"ratios", "update_norms", "weight_norms"}
    for name, tree in (("weight_norms", PARAMS), ("update_norms", updates)):
        np.testing.assert_allclose(
            actual[name]["dense/kernel"], np.linalg.norm(tree["dense"]["kernel"]), rtol=1e-6
        )
        np.testing.assert_allclose(
            actual[name]["layers"], np.linalg.norm(tree["layers"], axis=1), rtol=1e-6
        )
    assert actual["ratios"]["dense/bias"] == 1.0 and actual["ratios"]["layers"].shape == (3,)


def test_a_lamb_update_is_as_long_as_rate_times_ratio_times_direction():
    _, state = _after_one_update(optim.lamb(0.1, weight_decay=0.0, rules=RULES, collect=True))
    actual = diagnostics.read(state)
    # Without decay the first direction is all ones, so its norm is the root of the number of elements.
    np.testing.assert_allclose(actual["ratios"]["dense/kernel"], 5.0 / 2.0, rtol=1e-5)
    np.testing.assert_allclose(actual["update_norms"]["dense/kernel"], 0.5, rtol=1e-5)
    np.testing.assert_allclose(
        actual["update_norms"]["layers"], [0.5, 0.2, 0.1 * np.sqrt(2)], rtol=1e-5
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: optax.MultiSteps(tx, 1),
        lambda tx: optax.chain(optax.identity(), optax.chain(tx, optax.scale(1.0))),
    ],
    ids=["chain", "MultiSteps", "chain in chain"],
)
def test_read_inside_wrappers(wrap):
    tx = optim.lamb(0.1, rules=RULES, collect=True)
    _, plain = _after_one_update(tx)
    _, wrapped = _after_one_update(wrap(tx))
    jax.tree.map(np.testing.assert_allclose, diagnostics.read(wrapped), diagnostics.read(plain))


def test_partitions_are_combined():
    tx = optax.partition(
        {"lamb": optim.lamb(0.1, collect=True), "lars": optim.lars(0.1, collect=True)},
        {"dense": {"kernel": "lamb", "bias": "lars"}, "layers": "lars"},
    )
    actual = diagnostics.read(_after_one_update(tx)[1])
    assert set(actual["ratios"]) == {"dense/kernel", "dense/bias", "layers"}


def test_nothing_collected():
    _, state = _after_one_update(optax.chain(optim.lamb(0.1), optax.adam(0.1)))
    assert diagnostics.read(state) == {} and diagnostics.scalars(state) == {}


def test_summary_is_of_the_layers_that_adapt():
    metadata = optim.parameters.resolve(PARAMS, RULES)
    _, state = _after_one_update(optim.lamb(0.1, weight_decay=0.0, rules=RULES, collect=True))
    actual = diagnostics.summary(state, metadata)
    # The kernel has 5 / 2, and the stack 5, 2 and 0 over the root of 2; a norm of 0 gives the ratio
    # 1. The bias does not adapt, so it is left out.
    ratios = [2.5, 5 / np.sqrt(2), 2 / np.sqrt(2), 1.0]
    assert actual == pytest.approx(
        {"ratio_min": 1.0, "ratio_median": np.median(ratios), "ratio_max": max(ratios)}, rel=1e-5
    )


def test_nothing_to_sum_up():
    still = optim.parameters.resolve(PARAMS, [("", {"adapt": False})])
    _, state = _after_one_update(optim.lamb(0.1, rules=RULES, collect=True))
    assert diagnostics.summary(state, still) == {}
    _, state = _after_one_update(optim.lamb(0.1))
    assert diagnostics.summary(state, optim.parameters.resolve(PARAMS, RULES)) == {}


def test_scalars_name_the_layer():
    flat = diagnostics.scalars(_after_one_update(optim.lamb(0.1, rules=RULES, collect=True))[1])
    assert len(flat) == 3 * 5
    assert flat["weight_norms/layers[1]"] == 2.0
    assert flat["weight_norms/dense/kernel"] == 5.0
