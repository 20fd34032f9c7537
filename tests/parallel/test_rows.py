"""Tests the order of a batch's rows for the host, the mesh and the microbatches of a step."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib

EXAMPLES = 24
STEPS = 3


def test_docstrings() -> None:
    result = doctest.testmod(rows_lib)
    assert result.failed == 0 and result.attempted >= 3


def test_microbatches_are_runs_of_examples_on_any_devices() -> None:
    for shards in (1, 2, 4):
        order = rows_lib.microbatch_order(24, shards, 3).reshape(shards, 3, -1)
        assert sorted(order.ravel().tolist()) == list(range(24))
        for number in range(3):
            run = order[:, number].ravel().tolist()
            assert run == list(range(8 * number, 8 * number + 8))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_device_and_later_microbatch_have_the_rows_of_the_global_order(shards: int) -> None:
    order = rows_lib.microbatch_order(EXAMPLES, shards, STEPS)
    of_all = rows_lib.positions(EXAMPLES, shards, STEPS)
    of_each = [
        rows_lib.positions(EXAMPLES // shards, shards, STEPS, jnp.int32(shard))
        for shard in range(shards)
    ]
    size = EXAMPLES // STEPS
    one_by_one = [
        rows_lib.later(
            rows_lib.positions(size // shards, shards, 1, jnp.int32(shard)), jnp.int32(index), size
        )
        for shard in range(shards)
        for index in range(STEPS)
    ]
    for actual in (of_all, jnp.concatenate(of_each), jnp.concatenate(one_by_one)):
        assert actual.dtype == jnp.int32
        np.testing.assert_array_equal(actual, order)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_cut_gives_runs_of_consecutive_examples_and_joined_inverts_it(shards: int) -> None:
    order = rows_lib.microbatch_order(EXAMPLES, shards, STEPS)
    field = jnp.stack([jnp.asarray(order), -jnp.asarray(order)], axis=1)
    actual = rows_lib.cut(field, shards, STEPS)
    runs = np.arange(EXAMPLES).reshape(STEPS, -1)
    np.testing.assert_array_equal(actual, np.stack([runs, -runs], axis=2))
    np.testing.assert_array_equal(rows_lib.joined(actual, shards, STEPS), field)


@pytest.mark.optimized
def test_cut_and_joined_move_no_example_between_devices() -> None:
    mesh = mesh_lib.make_mesh({"data": 4}, jax.devices()[:4])
    sharding = mesh_lib.batch_sharding(mesh)

    def there_and_back(field: jax.Array) -> tuple[jax.Array, jax.Array]:
        actual = rows_lib.cut(field, 4, STEPS, sharding)
        return actual, rows_lib.joined(actual, 4, STEPS, sharding)

    shape = jax.ShapeDtypeStruct((EXAMPLES, 2), jnp.float32, sharding=sharding)
    text = jax.jit(there_and_back).lower(shape).compile().as_text()
    assert text is not None
    for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert name not in text


def test_host_reads_the_examples_that_its_rows_hold() -> None:
    mesh = mesh_lib.make_mesh({"data": 4}, jax.devices()[:4])
    examples = rows_lib.local_examples(EXAMPLES, mesh, STEPS)
    batch = rows_lib.shard_batch({"example": examples}, EXAMPLES, mesh)["example"]
    order = rows_lib.microbatch_order(EXAMPLES, 4, STEPS)
    np.testing.assert_array_equal(batch, order)
    for index, shard in enumerate(batch.addressable_shards):
        actual = rows_lib.positions(EXAMPLES // 4, 4, STEPS, jnp.int32(index))
        np.testing.assert_array_equal(shard.data, actual)


def test_rows_of_a_process_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_lib.make_mesh({"data": -1})
    np.testing.assert_array_equal(rows_lib.local_rows(16, mesh), np.arange(16))

    class OfOneProcess(NamedSharding):
        def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
            own = {1, 2, 6}
            every = super().devices_indices_map(shape)
            return {device: index for device, index in every.items() if device.id in own}

    sharding = OfOneProcess(mesh, PartitionSpec("data"))
    monkeypatch.setattr(rows_lib, "batch_sharding", lambda mesh: sharding)
    uncached = rows_lib.local_rows.__wrapped__
    assert uncached(16, mesh).tolist() == [2, 3, 4, 5, 12, 13]
