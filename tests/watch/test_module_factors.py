"""Tests that records have the module factors, wherever these are in the optimizer state."""

from types import SimpleNamespace

import jax.numpy as jnp
import optax
import pytest

from lamb_tpu import optim, spec
from lamb_tpu.watch.module_factors import ModuleFactors
from tests import tiny
from tests.watch.observing import record

FIELDS = {"modules": (("body", "^b"), ("head", "")), "interval": 1, "start": 0, "momentum": 0.0}


@pytest.mark.parametrize("rounded", [False, True])
def test_factors_by_name(rounded: bool) -> None:
    config = tiny.change(tiny.digits(), {"optimizer.agvm": FIELDS})
    observer = ModuleFactors(spec.parse(config).optimizer)
    params = {"b": jnp.ones(2, jnp.bfloat16), "h": jnp.ones(2, jnp.bfloat16)}
    tx = optim.make_optimizer(
        {"name": "sgd", "agvm": FIELDS, "stochastic_rounding": rounded}, 0.1, params
    )
    a = {"b": jnp.array([1.0, 0.0]), "h": jnp.array([2.0, 1.0])}
    b = {"b": jnp.array([1.0, 1.0]), "h": jnp.array([-1.0, 2.0])}
    _, state = tx.update(params, tx.init(params), params, halves=(a, b))
    one = record(1, state=SimpleNamespace(opt_state=state))
    observer.recorded(one)
    # The cosines are sqrt(1/2) and 0. The ratio of the distances, (1 - sqrt(1/2)) / 1, is clipped to
    # the lower bound 0.5, and the factor is its square root.
    assert one.values == {"agvm/body": 1.0, "agvm/head": pytest.approx(0.5**0.5)}


def test_a_run_without() -> None:
    one = record(1, state=SimpleNamespace(opt_state=optax.EmptyState()))
    ModuleFactors(spec.parse(tiny.digits()).optimizer).recorded(one)
    assert one.values == {}
