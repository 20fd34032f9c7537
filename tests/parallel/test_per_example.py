"""Compares per-example variances with separately computed gradients, on any number of devices."""

from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.parallel import per_example
from lamb_tpu.parallel.gradient_statistics import Statistics
from tests.marks import some
from tests.parallel.nets import DROPOUT
from tests.parallel.test_changing import GRANULARITY, PLACES, changing, prepared, start, taken
from tests.parallel.test_gradient_statistics import contributions

ROWS = 32


def expected(each: Any, rows: int) -> dict[str, float]:
    """Computes metrics with NumPy in float64; variances are over the first `rows` examples."""
    flat = np.concatenate(
        [g.reshape(len(g), -1).astype(np.float64) for g in jax.tree.leaves(each)], axis=1
    )
    mean, first = flat.mean(0), flat[:rows]
    variance, inner = first.var(0, ddof=1).sum(), (first @ mean).var(ddof=1)
    return {
        "variance": variance,
        "inner_product_variance": inner,
        "grad_sq": mean @ mean,
        "orthogonal_variance": variance - inner / (mean @ mean),
    }


@pytest.mark.long
@pytest.mark.parametrize("place", some(PLACES, ("one", "shard_map zero1")))
def test_each_equals_its_reference(place: str) -> None:
    devices, changes = PLACES[place]
    run = prepared(devices, 2, model=DROPOUT, **changes)
    step = changing(run, statistics=Statistics(per_example=ROWS))
    batches = taken(run, data.TrainLoader(run.train_set, GRANULARITY, 0), 2)
    each = contributions(run, start(run), batches)
    _, sums = step(start(run), batches, per_example=True)
    values = expected(each, ROWS)
    for name, value in values.items():
        assert tuple(map(float, sums[name])) == (pytest.approx(value, rel=1e-4), 1.0)
    assert abs(expected(each, 2 * ROWS)["variance"] / values["variance"] - 1) > 0.01
    # An update that is not due has pairs of 0.
    _, sums = step(start(run), batches)
    assert {tuple(map(float, sums[name])) for name in values} == {(0.0, 0.0)}


@pytest.mark.long
def test_chunks_change_nothing() -> None:
    run = prepared(8, 1, model=DROPOUT)
    state = start(run)
    (batch,) = taken(run, data.TrainLoader(run.train_set, GRANULARITY, 0), 1)
    weights = {name: np.float32(w) for name, w in run.task.weights(batch).items()}
    grads = jax.tree.map(lambda leaf: 0.1 * leaf, state.params)
    actual = []
    for most in (per_example.CHUNK_BYTES, 1):
        metrics = per_example.make_per_example(run.task, run.mesh, ROWS, most)
        given = state, grads, batch, weights, np.int32(1)
        assert ("scan[" in str(jax.make_jaxpr(metrics)(*given))) == (most == 1)
        actual.append(jax.jit(metrics)(*given))
    for name, (value, _) in actual[0].items():
        np.testing.assert_allclose(value, actual[1][name][0], rtol=1e-4)


def test_number_of_chunks() -> None:
    def chunks(rows: int, size: int) -> int:
        return per_example._chunks(rows, size, 100)

    assert [chunks(8, 12), chunks(8, 13), chunks(8, 50), chunks(8, 51), chunks(8, 1000)] == [
        1,
        2,
        4,
        8,
        8,
    ]
    assert chunks(6, 40) == 3 and chunks(7, 40) == 7


def test_names() -> None:
    names = {"variance", "inner_product_variance", "orthogonal_variance", "grad_sq"}
    assert set(per_example.unmeasured()) == names
