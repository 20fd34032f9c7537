"""Top-k with error feedback: what is sent, what waits, and the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import EXCHANGES, Residual
from lamb_tpu.parallel.exchange.topk import TopK
from tests.parallel.exchange import over


def test_three_updates_by_hand() -> None:
    """Each of two devices sends one of four values."""
    exchange = TopK(over.AXES, 2, ratio=0.25)
    every = [
        {"x": np.array([[4, 3, 0, 0], [0, -1, -2, 0]], np.float32)},
        {"x": np.array([[0, 0, 2, 0], [0, -1, 0, 0]], np.float32)},
        {"x": np.zeros((2, 4), np.float32)},
    ]
    sums, residuals = over.run(exchange, every)
    assert [found["x"].tolist() for found in sums] == [
        [4, 0, -2, 0],
        [0, 3 - 2, 0, 0],
        [0, 0, 2, 0],
    ]
    errors = [residual.device["error"][0].tolist() for residual in residuals]
    assert errors == [[[0, 3, 0, 0], [0, -1, 0, 0]], [[0, 0, 2, 0], [0, 0, 0, 0]], [[0] * 4] * 2]


def test_a_fraction_of_each_leaf_or_of_all() -> None:
    shapes = {"a": (10, 10), "b": (20,)}
    large_a = over.gradients(shapes, 1)
    large_a[0]["a"] *= 100
    for layerwise, number in ((False, (12, 0)), (True, (10, 2))):
        _, (residual,) = over.run(TopK(over.AXES, 8, ratio=0.1, layerwise=layerwise), large_a)
        error = np.concatenate(residual.device["error"], axis=-1)
        assert (error[:, :100] == 0).sum(-1).tolist() == [number[0]] * 8
        assert (error[:, 100:] == 0).sum(-1).tolist() == [number[1]] * 8


@pytest.mark.parametrize("layerwise", [False, True])
def test_bytes_are_those_of_the_values_and_indices(layerwise: bool) -> None:
    params = {
        "a": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
        "b": jax.ShapeDtypeStruct((1000,), jnp.float32),
    }
    exchange = TopK(over.AXES, 8, ratio=0.001, layerwise=layerwise)
    assert over.sent(exchange, params) == {"u32": 7 * 1001 * 8}


def test_options() -> None:
    assert EXCHANGES["topk"] is TopK
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\], the fraction of values"):
        TopK(over.AXES, 8, ratio=0)
    exchange = TopK(over.AXES, 8)
    assert exchange.at(0) == exchange and isinstance(exchange.init({"x": jnp.ones(3)}), Residual)
