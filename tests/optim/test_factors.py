"""Tests rate factors, decay factors, and scheduled weight decay for every optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import diagnostics
from lamb_tpu.optim.factory import OPTIMIZERS, make_optimizer
from tests.marks import MAIN, some
from tests.optim import runs

RATE = optim.warmup(0.1, 10, 2)
LEAVES = ("kernel", "bias", "zero")
PARAMS, *GRADS = (
    {name: np.asarray(tree[name], np.float32) for name in LEAVES}
    for tree in (lambda params, grads: (params, *grads))(*runs.case(steps=4))
)
# Do not clip, because the global norm would depend on all partitions.
ARGUMENTS = {"adagrad_norm": {"per_layer": True}, "apollo": {"rank": 1}}
# Every optimizer, and presets in which another quantity is multiplied by the rate.
FORMS = [(name, None) for name in OPTIMIZERS] + [
    ("lamb", "keras"),
    ("lamb", "deepspeed"),
    ("lars", "larc"),
    ("lars", "timm"),
    ("lars", "simclr_popular"),
    ("novograd", "tfa"),
    ("novograd", "apex"),
]


def build(name, rate=RATE, preset=None, **arguments):
    config = {"name": name, "preset": preset, **ARGUMENTS.get(name, {}), **arguments}
    return make_optimizer(config, rate)


def assert_close(actual, expected, rtol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * float(np.abs(b).max())
        ),
        actual,
        expected,
    )


def trained(tx):
    return runs.after(tx, PARAMS, GRADS)[0]


def in_partitions(name, make, factors):
    """Returns the weights after training with `optax.partition`, with one transform per factor."""
    if name == "apollo":  # projections depend on the leaf's index in the full tree
        full = {factor: trained(make(factor)) for factor in set(factors.values())}
        return {leaf: full[factor][leaf] for leaf, factor in factors.items()}
    return trained(optax.partition({f: make(f) for f in factors.values()}, factors))


def rules_of(meta, factors):
    return [(f"^{leaf}$", {meta: factor}) for leaf, factor in factors.items()]


@pytest.mark.long
@pytest.mark.parametrize("form", some(FORMS, [(name, None) for name in MAIN]))
def test_a_rate_factor_is_another_rate(form):
    """Without global clipping, one table of rules equals a partition with one transform per rate."""
    name, preset = form
    factors = {"kernel": 0.3, "bias": 2.0, "zero": 1.0}
    arguments = {"preset": preset, "clip_global_norm": None, "weight_decay": 0.1}
    actual = trained(build(name, rules=rules_of("rate_factor", factors), **arguments))
    expected = in_partitions(
        name, lambda factor: build(name, lambda t: factor * RATE(t), **arguments), factors
    )
    assert_close(actual, expected)
    plain = trained(build(name, **arguments))
    assert not np.allclose(actual["kernel"], plain["kernel"], rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_a_rate_factor_of_0_freezes(name):
    actual = trained(
        build(name, weight_decay=0.1, rules=[("kernel", {"rate_factor": 0}), ("", {})])
    )
    np.testing.assert_allclose(actual["kernel"], PARAMS["kernel"], rtol=1e-6)
    assert not np.allclose(actual["bias"], PARAMS["bias"])


@pytest.mark.long
@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_a_decay_factor_is_another_decay(name):
    factors = {"kernel": 0.25, "bias": 3.0, "zero": 0.0}
    actual = trained(build(name, weight_decay=0.1, rules=rules_of("decay_factor", factors)))
    expected = in_partitions(name, lambda factor: build(name, weight_decay=0.1 * factor), factors)
    assert_close(actual, expected)
    plain = trained(build(name, weight_decay=0.1))
    for leaf in ("kernel", "bias"):
        assert not np.allclose(actual[leaf], plain[leaf], rtol=1e-5), leaf


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_a_weight_decay_may_be_a_schedule(name):
    """Each update uses the schedule's value at the number of completed updates."""
    table = jnp.array([0.1, 0.0, 0.4, 0.2, 0.3])
    scheduled = build(name, weight_decay=lambda t: table[t])
    params = expected = PARAMS
    state, other = (tx.init(params) for tx in (scheduled, build(name, weight_decay=0.1)))
    for step, grad in enumerate(GRADS):
        number = build(name, weight_decay=float(table[step]))
        updates, state = scheduled.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        updates, other = number.update(grad, other, expected)
        expected = optax.apply_updates(expected, updates)
    assert_close(params, expected)
    still = trained(build(name, weight_decay=0.1))
    assert not np.allclose(params["kernel"], still["kernel"], rtol=1e-5)


@pytest.mark.parametrize("name", ["lamb", "lars", "adamw", "muon"])
def test_clipping_stays_one_norm_of_all_gradients(name):
    arguments = {"rules": [("^kernel$", {"rate_factor": 0.1}), ("", {})], "weight_decay": 0.1}
    clipped = build(name, clip_global_norm=0.5, **arguments)
    outside = optax.chain(optim.clip_global_norm(0.5), build(name, **arguments))
    assert_close(trained(clipped), trained(outside))


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_the_trust_ratio_does_not_see_the_rate(name):
    def ratios(rules):
        tx = build(name, collect=True, rules=rules)
        _, state = tx.update(GRADS[0], tx.init(PARAMS), PARAMS)
        return diagnostics.read(state)["ratios"]

    slowed = ratios([("^kernel$", {"rate_factor": 0.1}), ("", {})])
    assert slowed == ratios("all")
    decayed = ratios([("^kernel$", {"decay_factor": 100.0}), ("", {})])
    assert not np.allclose(slowed["kernel"], decayed["kernel"], rtol=1e-4)


def test_layerwise_rate_decay_in_one_table():
    params = {f"layer_{i}": jnp.ones(4) for i in range(3)}
    rules = [(f"layer_{i}", {"rate_factor": 0.5 ** (2 - i)}) for i in range(3)]
    tx = make_optimizer({"name": "adamw", "weight_decay": 0.0, "rules": rules}, 0.1)
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(
        [updates[f"layer_{i}"][0] for i in range(3)], [-0.025, -0.05, -0.1], rtol=1e-5
    )
