"""Compares k-th largest values, masks of the largest, and indices of set entries with NumPy."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.cost.topology import devices, topology
from lamb_tpu.parallel.exchange import selection


def test_examples() -> None:
    assert doctest.testmod(selection).attempted and not doctest.testmod(selection).failed


def magnitudes(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    return {
        "normal": lambda: np.abs(rng.normal(size=size)),
        "ties": lambda: rng.integers(0, 4, size).astype(float),
        "zeros": lambda: np.zeros(size),
        "tiny and large": lambda: np.exp(rng.uniform(-100, 80, size)),
        "infinite": lambda: np.where(rng.random(size) < 0.2, np.inf, rng.random(size)),
    }[kind]().astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "tiny and large", "infinite"])
@pytest.mark.parametrize("size", [1, 31, 32, 1000])
def test_the_largest_of_equal_values_the_first(kind: str, size: int) -> None:
    values = magnitudes(kind, size)
    for k in sorted({1, max(1, size // 10), size}):
        order = np.argsort(-values, kind="stable")
        assert selection.kth_largest(values, k) == values[order[k - 1]]
        expected = np.zeros(size, bool)
        expected[order[:k]] = True
        np.testing.assert_array_equal(selection.largest(jnp.asarray(values), k), expected)


def test_float64_is_exact_too() -> None:
    with jax.enable_x64(True):
        values = jnp.asarray([1.0, 1.0 + 2**-50, 0.5])
        assert selection.largest(values, 1).tolist() == [False, True, False]


def test_nan_is_among_the_largest_so_that_every_device_sees_it() -> None:
    values = jnp.asarray([1.0, jnp.nan, 3.0, jnp.nan])
    for k, expected in [(1, [1]), (2, [1, 3]), (3, [1, 2, 3])]:
        assert np.flatnonzero(selection.largest(values, k)).tolist() == expected


@pytest.mark.parametrize("size", [1, 32, 33, 1000, 4096, 9000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_places_of_set_entries(size: int, share: float) -> None:
    mask = np.random.default_rng(size).random(size) < share
    where = np.flatnonzero(mask)
    actual = np.asarray(jax.jit(selection.places)(jnp.asarray(mask), jnp.arange(size + 3)))
    np.testing.assert_array_equal(np.sort(actual[: len(where)]), where)
    np.testing.assert_array_equal(actual[len(where) :], size)
    for count in (0, 1, size // 2, len(where), size, size + 1):
        first = np.zeros(size, bool)
        first[where[:count]] = True
        np.testing.assert_array_equal(selection.first(jnp.asarray(mask), count), first)


def test_a_tpu_needs_no_more_memory_than_the_values_have() -> None:
    """With an axis of 32, which a TPU pads to 128, a program would need 20 bytes per value.

    BERT-Large has 340 million values.
    """
    size = 2**20
    mesh = Mesh(np.array(devices(topology("v3-8"))[:1]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    mask, ranks = (
        jax.ShapeDtypeStruct((count,), dtype, sharding=whole)
        for count, dtype in ((size, jnp.bool_), (size // 1000, jnp.int32))
    )
    program = jax.jit(selection.places, out_shardings=whole).lower(mask, ranks).compile()
    assert program.memory_analysis().temp_size_in_bytes < 5 * size
