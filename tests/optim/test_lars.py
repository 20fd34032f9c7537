"""Both forms of LARS against other implementations and against their formulas."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from tests.optim import goldens

BOTH = "no decay, no ratio"


@pytest.mark.parametrize("implementation, setting, rules, eps", [
    ("tpu_efficientnet_lars", "base", "all", 0.0),
    ("tpu_efficientnet_lars", "excl", BOTH, 0.0),
    ("tpu_efficientnet_lars", "warm", BOTH, 0.0),
    ("mlperf_resnet_tf2_lars", "base", "all", 1e-7),
    ("mlperf_resnet_tf2_lars", "excl", BOTH, 1e-7),
    ("mlperf_resnet_tf2_lars", "warm", BOTH, 1e-7),
    ("flax_optim_lars", "base", "all", 0.0),
    ("mlperf_resnet_jax_lars", "const", BOTH, 0.0),
    # These keep the learning rate outside the momentum: the same while it is constant.
    ("timm_lars", "excl", BOTH, 1e-8),
    ("timm_lars", "bigeps", "all", 1e-2),
    ("timm_lars", "nomom", "all", 1e-8),
])
def test_golden(implementation, setting, rules, eps):
    hyper, record, inputs = goldens.load("lars", implementation, setting)
    tx = optim.lars(
        goldens.rate(record),
        momentum=hyper.get("momentum", hyper.get("beta")),
        weight_decay=hyper["weight_decay"],
        coefficient=hyper["trust_coefficient"],
        eps=eps,
        rules=goldens.RULES[rules],
    )
    goldens.check(tx, record, inputs, hyper["float64"])


def test_golden_of_algorithm_1():
    # SimCLR's "popular" momentum divides by the norm of the decayed momentum, like Algorithm 1;
    # its coefficient multiplies the ratio, and so the rate, of every tensor that is not all 0.
    hyper, record, inputs = goldens.load("lars", "simclr_lars", "popular")
    tx = optim.lars_lamb_paper(
        hyper["lr"] * hyper["trust_coefficient"],
        b1=hyper["momentum"],
        weight_decay=hyper["weight_decay"],
    )
    goldens.check(tx, record, inputs, hyper["float64"], skip=("zero_init/kernel",))


def test_the_rate_is_inside_the_momentum_of_2017_only():
    params = {"kernel": jnp.array([3.0, 4.0])}
    grads = {"kernel": jnp.array([0.0, 2.0])}
    rates = jnp.array([1.0, 0.0])
    steps = {}
    for name, tx in {
        "2017": optim.lars(lambda t: rates[t], coefficient=0.1, weight_decay=0.0),
        "lamb paper": optim.lars_lamb_paper(lambda t: rates[t], weight_decay=0.0),
    }.items():
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        steps[name] = float(updates["kernel"][1])
    # The second step has the rate 0: what is left is the momentum of 0.1 * 5 / 2 * 2 = 0.5.
    np.testing.assert_allclose(steps["2017"], -0.9 * 0.5, rtol=1e-6)
    assert steps["lamb paper"] == 0.0


def test_leaves_that_do_not_adapt_take_momentum_sgd_without_decay():
    rng = np.random.default_rng(0)
    params = {"bias": jnp.asarray(rng.standard_normal(3), jnp.float32)}
    ours = optim.lars(0.1, weight_decay=0.5, rules=[("bias", {"decay": False, "adapt": False})])
    plain = optax.sgd(0.1, momentum=0.9)
    state, expected = ours.init(params), plain.init(params)
    for _ in range(3):
        grads = {"bias": jnp.asarray(rng.standard_normal(3), jnp.float32)}
        updates, state = ours.update(grads, state, params)
        reference, expected = plain.update(grads, expected, params)
        np.testing.assert_allclose(updates["bias"], reference["bias"], rtol=1e-5)


@pytest.mark.parametrize("arguments, message", [
    ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
    ({"coefficient": -0.1}, "coefficient .* not -0.1"),
    ({"weight_decay": -0.1}, "weight_decay .* not -0.1"),
    ({"eps": -0.1}, "eps .* not -0.1"),
    ({"norm": 2}, "norm must be one of .* not 2"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.lars(0.1, **arguments)


@pytest.mark.parametrize("arguments, message", [
    ({"b1": 1.0}, "b1 must be at least 0 and below 1, not 1.0"),
    ({"phi_bounds": (-1.0, 1.0)}, "phi_bounds"),
])
def test_bad_arguments_of_algorithm_1(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.lars_lamb_paper(0.1, **arguments)
