"""Selected values, sent and summed: the sums of NumPy, in one operation of the budget's size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.parallel.exchange import sparse
from tests.parallel.wire import wire_bytes
from tests.quick import jit

DEVICES, SIZES = 8, (100, 7, 64)


def vectors(budgets, dtype=np.float32):
    """Values and masks of every device; a mask selects up to its budget."""
    rng = np.random.default_rng(0)
    found = []
    for size, budget in zip(SIZES, budgets, strict=True):
        masks = np.zeros((DEVICES, size), bool)
        for device, mask in enumerate(masks):
            mask[rng.permutation(size)[: max(0, budget - device)]] = True
        found.append(sparse.Selected(rng.normal(size=(DEVICES, size)).astype(dtype), masks))
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("budgets", [(4, 1, 3), (60, 7, 20)])  # as indices, and all-reduced
def test_sums_of_selected_values(budgets, dtype) -> None:
    with jax.enable_x64(dtype is np.float64):
        given = vectors(budgets, dtype)
        found, every = jit(
            jax.vmap(
                lambda given: (
                    sparse.total(given, budgets, ("data",), DEVICES),
                    sparse.each(given, budgets, ("data",)),
                ),
                axis_name="data",
            )
        )(given)
        for sums, rows, (values, masks) in zip(found, every, given, strict=True):
            dense = np.where(masks, values, 0)
            assert sums.dtype == dtype and rows.shape == (DEVICES, *dense.shape)
            for device in range(DEVICES):
                np.testing.assert_allclose(sums[device], dense.sum(0), rtol=1e-6, atol=1e-6)
                np.testing.assert_array_equal(rows[device], dense)


@pytest.mark.parametrize(
    "budgets, sent",
    [
        # 8 values of 4 bytes and 8 indices, to each of the others.
        ((4, 1, 3), {"u32": 7 * 8 * 8}),
        # All values: less than 22 values and indices to each of the others.
        ((10, 2, 10), {"f32": 4 * sum(SIZES) * 2 * 7 // 8}),
    ],
)
def test_one_operation_of_the_budgets_size(budgets, sent) -> None:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    mapped = jax.shard_map(
        lambda given: sparse.total(
            jax.tree.map(lambda x: x[0], given), budgets, ("data",), DEVICES
        ),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    compiled = jit(mapped).lower(vectors(budgets)).compile()
    assert wire_bytes(compiled) == sent


def test_split_cuts_the_last_axis() -> None:
    parts = sparse.split(jnp.arange(12).reshape(2, 6), [1, 0, 5])
    assert [part.shape for part in parts] == [(2, 1), (2, 0), (2, 5)]
    assert parts[2].tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]


def test_indices_have_32_bits() -> None:
    sparse.check_length(2**31 - 1)
    with pytest.raises(ValueError, match="2147483648 values are too many for indices of 32 bits"):
        sparse.check_length(2**31)
