"""Tests the shardings of a train state, and the memory that they save."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.run.build import Run, prepare
from tests import tiny
from tests.raising import rejected

MODEL = ConfigDict({"name": "mlp", "hidden_sizes": (64, 32), "batch_norm": True})
ZERO1 = {"parallel__optimizer_state": "zero1"}


def run_of(num_devices: int, **changes: Any) -> Run:
    return prepare(tiny.digits(model=MODEL, **changes), None, jax.devices()[:num_devices])


def held(tree: Any) -> int:
    """Returns the bytes of a tree on the first device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )


@pytest.mark.long
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_zero1_holds_what_was_computed(num_devices: int) -> None:
    run = run_of(num_devices, **ZERO1)
    state = run.first_state()
    actual = held(state.opt_state)
    assert actual == rules_lib.bytes_per_device(state.opt_state, run.shardings.opt_state)
    # Each device has an equal shard of every tensor, except for the output's bias of length 10, which
    # 8 does not divide.
    split = 64 * 64 + 64 * 32 + 32 * 10 + 2 * (64 + 32)
    last = 10 if num_devices == 8 else 10 // num_devices
    assert actual == 2 * 4 * (split // num_devices + last) + 4
    whole = run_of(num_devices)
    assert held(whole.first_state().opt_state) == 2 * 4 * (split + 10) + 4
    assert held(state.params) == held(whole.first_state().params)


def test_fsdp_splits_parameters_and_all_that_follows_them() -> None:
    rules = (("hidden0/kernel", "fsdp"),)
    state = run_of(8, parallel__rules=rules, ema__decay=0.9).first_state()
    for tree in (state.params, state.opt_state.mu, state.opt_state.nu, state.ema[0]):
        shards = tree["hidden0"]["kernel"].addressable_shards
        assert {shard.data.shape for shard in shards} == {(8, 64)}
        assert tree["hidden1"]["kernel"].addressable_shards[0].data.shape == (64, 32)


def test_average_is_split_as_the_optimizers_state() -> None:
    state = run_of(8, ema__decay=0.9, **ZERO1).first_state()
    assert held(state.ema[0]) < held(state.params) / 7
    tiny.assert_equal(state.ema, (state.params, state.model_state))


def test_axis_of_each_update() -> None:
    run = run_of(8, **ZERO1)
    names = {path: run.layout.axis_name(path) for path in parameters.leaf_paths(run.layout.params)}
    assert names.pop("output/bias") is None
    assert set(names.values()) == {"data"} and "hidden0/kernel" in names
    inner = run_of(8, mesh__data=2, mesh__fsdp=4, **ZERO1)
    assert inner.layout.axis_name("hidden0/kernel") == "fsdp"
    assert inner.layout.update_spec("hidden0/kernel") == PartitionSpec("fsdp")
    mesh = mesh_lib.make_mesh({"data": -1})
    params = run.abstract_state.params
    metadata = parameters.resolve(params, "all")
    layout = make_layout(params, mesh, metadata)
    assert layout.axis_name("hidden0/kernel") is layout.update_spec("hidden0/kernel") is None


def test_state_does_not_depend_on_where_it_lives() -> None:
    states = [run_of(n, **changes).first_state() for n, changes in ((1, {}), (8, ZERO1))]
    tiny.assert_equal(states[0], states[1])


def test_fields_of_64_bits_make_no_warning() -> None:
    run = run_of(1)
    init = state_lib.make_init(run.task, run.tx, {"image": np.zeros((1, 8, 8, 1))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = jax.eval_shape(init, jax.random.key(0))
    assert actual.params["hidden0"]["kernel"].dtype == jnp.float32


def test_optimizer_that_needs_unsplit_matrices() -> None:
    optimizer = ConfigDict({"name": "muon", "learning_rate": 0.01})
    run_of(8, optimizer=optimizer, **ZERO1)
    run_of(8, optimizer=optimizer, parallel__backend="shard_map")
    with rejected("config.optimizer", ..., ": muon needs full matrices", "hidden0/kernel"):
        run_of(8, optimizer=optimizer, parallel__backend="shard_map", **ZERO1)


@pytest.mark.long
def test_given_values_replace_random_ones() -> None:
    run = run_of(1, ema__decay=0.9)
    drawn, kernel = run.first_state(), jnp.full((64, 64), 0.5)
    given = {
        "params/hidden0/kernel": kernel,
        "model_state/batch_stats/norm0/mean": jnp.arange(64.0),
        "opt_state/count": jnp.int32(7),
    }
    state = run.init(jax.random.key(0), given)
    expected = tiny.arrays(drawn)
    for path, value in (
        (".params['hidden0']['kernel']", kernel),
        (".ema[0]['hidden0']['kernel']", kernel),
        (".model_state['batch_stats']['norm0']['mean']", jnp.arange(64.0)),
        (".ema[1]['batch_stats']['norm0']['mean']", jnp.arange(64.0)),
        (".opt_state.count", 7),
    ):
        assert not np.array_equal(expected[path], value)
        expected[path] = np.asarray(value, expected[path].dtype)
    actual = tiny.arrays(state)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, rtol=1e-6, err_msg=path)
