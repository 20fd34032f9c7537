"""Factors of rate and decay, and weight decays that are schedules, under every optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import readings
from lamb_tpu.optim.factory import OPTIMIZERS, make_optimizer
from tests.marks import MAIN, some
from tests.optim import runs

RATE = optim.warmup(0.1, 10, 2)
LEAVES = ("kernel", "bias", "zero")
PARAMS, *GRADS = (
    {name: np.asarray(tree[name], np.float32) for name in LEAVES}
    for tree in (lambda params, grads: (params, *grads))(*runs.case(steps=4))
)
# Without, the norm of all gradients together is one number for all parts.
ARGUMENTS = {"adagrad_norm": {"per_layer": True}, "apollo": {"rank": 1}}
# Every optimizer, and the presets in which the rate stands elsewhere.
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


def assert_close(found, expected, rtol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * float(np.abs(b).max())
        ),
        found,
        expected,
    )


def trained(tx):
    return runs.after(tx, PARAMS, GRADS)[0]


def in_parts(name, make, factors):
    """The weights after training with a transform for each factor, by `optax.partition`."""
    if name == "apollo":  # its projections go by a leaf's place in the tree: take it from the whole
        whole = {factor: trained(make(factor)) for factor in set(factors.values())}
        return {leaf: whole[factor][leaf] for leaf, factor in factors.items()}
    return trained(optax.partition({f: make(f) for f in factors.values()}, factors))


def rules_of(fact, factors):
    return [(f"^{leaf}$", {fact: factor}) for leaf, factor in factors.items()]


@pytest.mark.long
@pytest.mark.parametrize("form", some(FORMS, [(name, None) for name in MAIN]))
def test_a_rate_factor_is_another_rate(form):
    """A table of rules does what one transform a rate does, with no clip over all of them."""
    name, preset = form
    factors = {"kernel": 0.3, "bias": 2.0, "zero": 1.0}
    arguments = {"preset": preset, "clip_global_norm": None, "weight_decay": 0.1}
    found = trained(build(name, rules=rules_of("rate_factor", factors), **arguments))
    expected = in_parts(
        name, lambda factor: build(name, lambda t: factor * RATE(t), **arguments), factors
    )
    assert_close(found, expected)
    plain = trained(build(name, **arguments))
    assert not np.allclose(found["kernel"], plain["kernel"], rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_a_rate_factor_of_0_freezes(name):
    found = trained(build(name, weight_decay=0.1, rules=[("kernel", {"rate_factor": 0}), ("", {})]))
    np.testing.assert_allclose(found["kernel"], PARAMS["kernel"], rtol=1e-6)
    assert not np.allclose(found["bias"], PARAMS["bias"])


@pytest.mark.long
@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_a_decay_factor_is_another_decay(name):
    factors = {"kernel": 0.25, "bias": 3.0, "zero": 0.0}
    found = trained(build(name, weight_decay=0.1, rules=rules_of("decay_factor", factors)))
    expected = in_parts(name, lambda factor: build(name, weight_decay=0.1 * factor), factors)
    assert_close(found, expected)
    plain = trained(build(name, weight_decay=0.1))
    for leaf in ("kernel", "bias"):
        assert not np.allclose(found[leaf], plain[leaf], rtol=1e-5), leaf


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_a_weight_decay_may_be_a_schedule(name):
    """Each update is that of the number which the schedule gives for the count before it."""
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
        return readings.read(state)["ratios"]

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
