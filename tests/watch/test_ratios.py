"""Trust ratios in the records of a run."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import parameters
from lamb_tpu.watch.ratios import Ratios
from tests.watch.observing import record, start

PARAMS = {"b": {"kernel": jnp.array([3.0, 4.0])}, "a": {"kernel": jnp.array([1.0, 0.0])}}


def observed(collect: bool) -> tuple[dict[str, float], list[dict]]:
    tx = optim.lamb(0.1, weight_decay=0.0, collect=collect)
    _, opt_state = tx.update(
        {"b": {"kernel": jnp.array([1.0, 1.0])}, "a": {"kernel": jnp.array([1.0, 1.0])}},
        tx.init(PARAMS),
        PARAMS,
    )
    run = SimpleNamespace(
        metadata=parameters.resolve(PARAMS, parameters.DEFAULT_RULES),
        parameter_order=["b/kernel", "a/kernel"],
    )
    ratios, begun, one = Ratios(run), start(), record(7, state=SimpleNamespace(opt_state=opt_state))
    ratios.started(begun)
    ratios.recorded(one)
    return one.values, begun.records.actual


def test_ratios_of_every_layer_in_network_order() -> None:
    values, (layers,) = observed(collect=True)
    actual = [layers["ratios/b/kernel"], layers["ratios/a/kernel"]]
    assert actual == pytest.approx([5 / 2**0.5, 1 / 2**0.5], rel=1e-4)
    assert values == pytest.approx(
        {"ratio_min": actual[1], "ratio_median": sum(actual) / 2, "ratio_max": actual[0]}
    )
    names = [name for name in layers if name.startswith("ratios/")]
    assert names == ["ratios/b/kernel", "ratios/a/kernel"] and layers["kind"] == "layers"


def test_optimizer_without_diagnostics() -> None:
    assert observed(collect=False) == ({}, [])
