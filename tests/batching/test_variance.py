"""Tests that variances of per-example gradients equal NumPy's, however the rows are split."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu.batching import noise_scale, variance

ROWS = 24


def _gradients(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(0.4, 1.0, (ROWS, 3, 2)).astype(np.float32),
        "b": rng.normal(-0.2, 2.0, (ROWS, 5)).astype(np.float32),
    }


def _mean(grads):
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), grads)


def _of_parts(grads, cuts, law="pooled", per_tensor=False):
    edges = [0, *cuts, ROWS]
    totals = [
        variance.sums(jax.tree.map(lambda leaf, s=s: leaf[s], grads), _mean(grads), per_tensor)
        for s in (slice(*pair) for pair in itertools.pairwise(edges))
    ]
    total = jax.tree.map(lambda *terms: sum(terms), *totals)
    return {name: float(v) for name, v in variance.statistics(total, law).items()}


def _expected(rows: np.ndarray) -> dict[str, float]:
    """Returns the statistics of one matrix by NumPy, in float64."""
    rows = rows.astype(np.float64)
    mean = rows.mean(axis=0)
    inner = rows @ mean
    across = rows - np.outer(inner, mean) / (mean @ mean)
    return {
        "variance": rows.var(axis=0, ddof=1).sum(),
        "inner_product_variance": inner.var(ddof=1),
        "orthogonal_variance": across.var(axis=0, ddof=1).sum(),
        "grad_sq": mean @ mean,
    }


@pytest.mark.parametrize("cuts", [(), (12,), (1, 9, 10)])
def test_the_statistics_do_not_depend_on_how_rows_are_cut(cuts) -> None:
    grads = _gradients()
    rows = np.concatenate([leaf.reshape(ROWS, -1) for leaf in grads.values()], axis=1)
    actual = _of_parts(grads, cuts)
    for name, value in _expected(rows).items():
        assert actual[name] == pytest.approx(value, rel=2e-6), name


def test_a_sample_of_a_batch_along_the_batchs_gradient() -> None:
    grads, batch = _gradients(), _mean(_gradients(1))
    total = variance.sums(grads, _mean(grads), direction=batch)
    actual = {name: float(v) for name, v in variance.statistics(total).items()}
    rows, along = (
        np.concatenate([leaf.reshape(n, -1) for leaf in tree.values()], axis=1, dtype=np.float64)
        for n, tree in ((ROWS, grads), (1, batch))
    )
    square, inner = np.square(along).sum(), rows @ along[0]
    across = rows - np.outer(inner, along[0]) / square
    assert actual == pytest.approx(
        {
            "variance": rows.var(axis=0, ddof=1).sum(),
            "inner_product_variance": inner.var(ddof=1),
            "grad_sq": square,
            "orthogonal_variance": across.var(axis=0, ddof=1).sum(),
        },
        rel=2e-6,
    )


def test_per_tensor_adds_statistics_of_tensors() -> None:
    grads = _gradients()
    each = [_expected(leaf.reshape(ROWS, -1)) for leaf in grads.values()]
    actual = _of_parts(grads, (8, 16), per_tensor=True)
    for name in each[0]:
        assert actual[name] == pytest.approx(sum(part[name] for part in each), rel=2e-6), name
    whole = _of_parts(grads, (8, 16))
    assert abs(actual["inner_product_variance"] / whole["inner_product_variance"] - 1) > 0.03


def test_the_law_of_parts() -> None:
    """Tests the law 'parts': the mean of the workers' variances plus the variance of their means."""
    grads = _gradients()
    rows = np.concatenate([leaf.reshape(ROWS, -1) for leaf in grads.values()], axis=1)
    workers = rows.astype(np.float64).reshape(3, 8, -1)
    expected = workers.var(axis=1, ddof=1).mean(axis=0) + workers.mean(axis=1).var(axis=0)
    actual = _of_parts(grads, (8, 16), law="parts")
    assert actual["variance"] == pytest.approx(expected.sum(), rel=2e-6)
    assert actual["variance"] > 1.01 * _of_parts(grads, (8, 16))["variance"]
    assert _of_parts(grads, (), law="parts") == pytest.approx(_of_parts(grads, ()))


def test_microbatch_means_are_the_noise_scales_trace() -> None:
    grads = _gradients()
    means = jax.tree.map(lambda leaf: leaf.reshape(6, 4, *leaf.shape[1:]).mean(axis=1), grads)
    actual = variance.statistics(variance.sums(means, _mean(grads)), examples_per_row=4)
    squares = sum(
        np.sum(np.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in means.values()
    )
    pair = noise_scale.estimate(squares.mean(), float(actual["grad_sq"]), 4, 24)
    assert float(actual["variance"]) == pytest.approx(float(pair.trace), rel=1e-5)


def test_microbatch_means_estimate_the_examples_variance_without_bias() -> None:
    rng = np.random.default_rng(3)
    measure = jax.jit(
        lambda means: variance.statistics(variance.sums(means, _mean(means)), examples_per_row=4)[
            "variance"
        ]
    )
    actual = [
        float(measure({"w": rng.normal(1.0, 1.0, (6, 4, 40)).mean(axis=1).astype(np.float32)}))
        for _ in range(200)
    ]
    assert np.mean(actual) == pytest.approx(40.0, rel=0.03)


def test_a_mean_of_zero_and_a_single_row() -> None:
    grads = {"w": jnp.array([[1.0, 0.0], [-1.0, 0.0]])}
    actual = variance.statistics(variance.sums(grads, _mean(grads)))
    assert {name: float(v) for name, v in actual.items()} == {
        "variance": 2.0,
        "inner_product_variance": 0.0,
        "orthogonal_variance": 2.0,
        "grad_sq": 0.0,
    }
    one = {"w": jnp.ones((1, 2))}
    assert np.isnan(variance.statistics(variance.sums(one, _mean(one)))["variance"])


def test_sums_over_devices() -> None:
    """Inside shard_map psum adds the sums of all devices, which gives the sums of all rows."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grads = _gradients()

    def local(rows):
        mean = jax.lax.pmean(_mean(rows), "data")
        return variance.statistics(jax.lax.psum(variance.sums(rows, mean), "data"))

    actual = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    )(grads)
    assert {name: float(v) for name, v in actual.items()} == pytest.approx(
        _of_parts(grads, ()), rel=2e-6
    )


def test_errors() -> None:
    grads = _gradients()
    total = variance.sums(grads, _mean(grads))
    with pytest.raises(ValueError, match="law='total' must be one of pooled, parts"):
        variance.statistics(total, law="total")
    with pytest.raises(ValueError, match="examples_per_row=0 must be a whole number"):
        variance.statistics(total, examples_per_row=0)
    with pytest.raises(ValueError, match="at least one leaf"):
        variance.sums({}, {})
