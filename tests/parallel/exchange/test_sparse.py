"""Compares sums of selected values with NumPy, and checks the bytes that are sent."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.parallel.exchange import sparse
from tests.parallel.wire import wire_bytes

DEVICES, SIZES = 8, (100, 7, 64)


def vectors(budgets, dtype=np.float32):
    """Returns values and masks of all devices; each mask selects at most its budget."""
    rng = np.random.default_rng(0)
    actual = []
    for size, budget in zip(SIZES, budgets, strict=True):
        masks = np.zeros((DEVICES, size), bool)
        for device, mask in enumerate(masks):
            mask[rng.permutation(size)[: max(0, budget - device)]] = True
        actual.append(sparse.Selected(rng.normal(size=(DEVICES, size)).astype(dtype), masks))
    return actual


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("budgets", [(4, 1, 3), (60, 7, 20)])  # sent as indices, and all-reduced
def test_sums_of_selected_values(budgets, dtype) -> None:
    with jax.enable_x64(dtype is np.float64):
        given = vectors(budgets, dtype)
        actual, every = jax.jit(
            jax.vmap(
                lambda given: (
                    sparse.total(given, budgets, ("data",)),
                    sparse.each(given, budgets, ("data",)),
                ),
                axis_name="data",
            )
        )(given)
        for sums, rows, (values, masks) in zip(actual, every, given, strict=True):
            dense = np.where(masks, values, 0)
            assert sums.dtype == dtype and rows.shape == (DEVICES, *dense.shape)
            for device in range(DEVICES):
                np.testing.assert_allclose(sums[device], dense.sum(0), rtol=1e-6, atol=1e-6)
                np.testing.assert_array_equal(rows[device], dense)


@pytest.mark.parametrize(
    "budgets, sent",
    [
        # A device sends 8 values of 4 bytes and their indices to each of the 7 other devices.
        ((4, 1, 3), {"u32": 7 * 8 * 8}),
        # An all-reduce of all values takes fewer bytes than 22 values and indices for each receiver.
        ((10, 2, 10), {"f32": 4 * sum(SIZES) * 2 * 7 // 8}),
    ],
)
def test_one_operation_of_the_budgets_size(budgets, sent) -> None:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    mapped = jax.shard_map(
        lambda given: sparse.total(jax.tree.map(lambda x: x[0], given), budgets, ("data",)),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(vectors(budgets)).compile()
    assert wire_bytes(compiled) == sent


def test_indices_have_32_bits() -> None:
    sparse.check_length(2**31 - 1)
    with pytest.raises(ValueError, match="num_values=2147483648 is too large for indices of 32"):
        sparse.check_length(2**31)
