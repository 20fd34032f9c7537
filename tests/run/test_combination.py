"""Properties of a run by which `compatibility` decides whether components can be combined."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu.batching.rules.variance_tests import NormTest
from lamb_tpu.run import exchanges
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.spec import parse
from tests import tiny


def mesh_of(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def of(**changes: Any) -> Combination:
    spec = parse(tiny.digits(**changes))
    return Combination(spec, optimizer=resolve_optimizer(spec.optimizer))


def own_sgd(learning_rate: float) -> None:
    """A custom optimizer without the argument `axis_name`."""


def test_only_explicit_collectives_see_devices_separately() -> None:
    mesh = mesh_of(data=2, fsdp=2, model=2)
    for backend, devices in (("jit", 1), ("shard_map", 4)):
        metadata = Combination(parse(tiny.digits(parallel__backend=backend)), mesh=mesh)
        assert (metadata.shards, metadata.devices, metadata.axis) == (4, devices, "model")
    assert Combination(metadata.spec, mesh=mesh_of(data=2, fsdp=1)).axis == ""


def test_bounds_with_and_without_a_rule() -> None:
    assert of(batch_size=96).bounds == (96, 96)
    rule = NormTest(granularity=16, eta=0.5, upper=64)
    assert Combination(of().spec, rule=rule).bounds == (16, 64)


def test_zero_momentum_is_no_momentum() -> None:
    momentum = ConfigDict({"name": "momentum", "learning_rate": 0.1, "momentum": 0.9})
    assert of(optimizer=momentum).momentum == "momentum"
    momentum.momentum = 0.0
    assert of(optimizer=momentum).momentum == ""
    assert of(optimizer=ConfigDict({"name": "lamb", "learning_rate": 0.1})).momentum == "b1"


@pytest.mark.parametrize("name, takes", [("lamb", True), (f"{__name__}:own_sgd", False)])
def test_shipped_optimizers_take_the_axis(name: str, takes: bool) -> None:
    assert of(optimizer=ConfigDict({"name": name, "learning_rate": 0.1})).takes_axis == takes


def test_exchanges_that_only_round() -> None:
    for name, rounds in (("float32", True), ("bfloat16", True), ("onebit", False)):
        spec = of(parallel__exchange=ConfigDict({"name": name})).spec
        run = Combination(spec, exchange=exchanges.make(spec, mesh_of(data=2)))
        assert run.rounds_only == rounds and run.exchange_name == name
