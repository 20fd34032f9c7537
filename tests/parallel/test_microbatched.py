"""Tests that one program for a constant batch with statistics gives the results of the host's loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.gradient_statistics import NO_STATISTICS, Statistics
from lamb_tpu.parallel.step import PLAIN
from tests import tiny
from tests.parallel.nets import BATCH_NORM, DROPOUT, difference
from tests.parallel.test_changing import (
    GRANULARITY,
    PLACES,
    changing,
    prepared,
    start,
    taken,
    weighted,
)
from tests.parallel.test_gradient_statistics import ALL

PARTS = Statistics(noise_scale=True, halves=True)
CASES: dict[str, tuple[Any, int, Statistics]] = {
    "dropout": (DROPOUT, 2, ALL),
    "batch_norm": (BATCH_NORM, 2, PARTS),
    "one by one": (DROPOUT, 1, Statistics(per_example=16)),
    "both": (DROPOUT, 4, Statistics(noise_scale=True, halves=True, per_example=16)),
    "lenet": ({"name": "lenet"}, 2, PARTS),
}
SETTINGS = [
    f"{case}, {place}" for case in CASES for place in PLACES if case != "lenet" or place == "one"
]


@pytest.mark.parametrize("backend", ["jit", "shard_map"])
def test_weights_that_depend_on_examples(backend: str) -> None:
    case = weighted(1.0)
    task, tx, layout, shapes, _ = case.arguments
    statistics = Statistics(noise_scale=True, per_example=4)
    step = ChangingStep(*case.arguments, backend, statistics=statistics)
    expected, wanted = step(case.first(jax.random.key(0), {}), case.batches, per_example=True)
    at_once = step.at_once(len(case.batches), PLAIN, True)
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    program = step_lib.make_train_step(task, tx, layout, places, backend, global_update=at_once)
    order = rows_lib.microbatch_order(24, 2, 3)
    batch = {
        name: np.concatenate([np.asarray(each[name]) for each in case.batches])[order]
        for name in case.batches[0]
    }
    batch = rows_lib.shard_batch(batch, 24, layout.mesh)
    actual, sums = program(case.first(jax.random.key(0), {}), batch)
    np.testing.assert_array_equal(actual.params["p"], expected.params["p"])
    assert sums.keys() == wanted.keys() and "variance" in sums
    for name, pair in wanted.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_as_the_programs_that_the_host_calls(setting: str) -> None:
    case, place = setting.split(", ")
    model, steps, statistics = CASES[case]
    devices, changes = PLACES[place]
    if case == "batch_norm":  # groups must lie within a part
        model = {**model, "group_size": GRANULARITY // 8}
    run = prepared(devices, steps, model=ConfigDict(model), **changes)
    step, batches = changing(run, statistics=statistics), []
    loader = data.TrainLoader(run.train_set, GRANULARITY, run.spec.seed)
    of_whole = data.TrainLoader(run.train_set, GRANULARITY * steps, run.spec.seed, run.local_rows())
    expected, actual = start(run), start(run)
    for measures in (False, bool(statistics.per_example)):
        batches = taken(run, loader, steps)
        expected, wanted = step(expected, batches, per_example=measures)
        at_once = step.at_once(steps, PLAIN, measures)
        program = run.make_train_step(global_update=at_once)
        actual, sums = program(actual, run.shard_batch(next(of_whole)))
        assert sums.keys() == wanted.keys()
        for name, pair in jax.device_get(wanted).items():
            np.testing.assert_allclose(sums[name], pair, rtol=1e-5, atol=1e-6, err_msg=name)
        assert not measures or float(sums["variance"][1]) == 1
    # Two programs may fuse the same additions differently, which changes the last bits.
    actual, expected = tiny.arrays(actual), tiny.arrays(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.long
def test_statistics_leave_the_update_alone() -> None:
    run = prepared(1, 2, model=DROPOUT)
    loader = data.TrainLoader(run.train_set, 2 * GRANULARITY, 0, run.local_rows())
    batch = run.shard_batch(next(loader))
    states = []
    for statistics in (NO_STATISTICS, ALL):
        at_once = changing(run, statistics=statistics).at_once(2, PLAIN, False)
        program = run.make_train_step(global_update=at_once if statistics else None)
        states.append(program(jax.tree.map(jnp.copy, start(run)), batch)[0])
    assert difference(states[1], states[0]) < 1e-6
