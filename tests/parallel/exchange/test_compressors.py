"""Tests that compressors are contractive, and that the devices' messages are summed correctly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange import compressors
from lamb_tpu.parallel.exchange.compressors import Identity, Sign, TopK
from tests.raising import rejected

ALL = [TopK(0.1), TopK(count=3), TopK(1.0), Sign(), Identity()]


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_contraction(compressor) -> None:
    """The d of a contraction is k / n for top-k, |x|_1^2 / (n |x|^2) for signs, and 1 for the identity."""
    rng = np.random.default_rng(0)
    for size in (1, 7, 100):
        x = rng.normal(size=size).astype(np.float32)
        actual = np.float64(jax.jit(lambda x: compressor.decompress(compressor.compress(x)))(x))
        norm = np.sum(np.float64(x) ** 2)
        error = np.sum((actual - x) ** 2)
        if isinstance(compressor, TopK):
            kept = np.flatnonzero(actual)
            assert len(kept) == compressor.budget(size)
            np.testing.assert_array_equal(actual[kept], x[kept])
            assert error <= (1 - len(kept) / size) * norm + 1e-6
        elif isinstance(compressor, Sign):
            np.testing.assert_allclose(error, norm - np.abs(x).sum() ** 2 / size, atol=1e-4)
        else:
            assert error == 0


def test_sign_of_zero_is_positive() -> None:
    sign = Sign()
    actual = sign.decompress(sign.compress(jnp.array([0.0, -3.0, -0.0])))
    assert actual.tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_messages_of_devices_add_up(compressor) -> None:
    rng = np.random.default_rng(1)
    sizes, devices = (40, 9, 1), 8
    every = [rng.normal(size=(devices, size)).astype(np.float32) for size in sizes]

    def send(vectors):
        messages = [compressor.compress(x) for x in vectors]
        own = [compressor.decompress(message) for message in messages]
        return own, compressor.total(messages, ("data",)), compressor.each(messages, ("data",))

    own, total, each = jax.jit(jax.vmap(send, axis_name="data"))(every)
    for mine, sums, rows in zip(own, total, each, strict=True):
        for device in range(devices):
            np.testing.assert_allclose(sums[device], mine.sum(0), rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(rows[device], mine)


def test_names() -> None:
    assert compressors.make_compressor("topk", 0.2) == TopK(0.2)
    assert compressors.make_compressor("sign", 0.2) == Sign()
    assert compressors.make_compressor("identity", 0.2) == Identity()
    assert compressors.make_compressor(TopK(count=3), 0.2) == TopK(count=3)
    with rejected("compressor", "q", "is unknown", kind=ArgumentError):
        compressors.make_compressor("q", 0.2)
    for ratio in (0, 1.5, -0.1, float("nan")):
        with rejected("ratio", ..., "is out of range", kind=ArgumentError):
            compressors.make_compressor("topk", ratio)
    with rejected("count", 0, "is out of range", kind=ArgumentError):
        TopK(count=0)
