"""Meshes from a config, and batches spread over them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib


@pytest.mark.parametrize(
    "asked, shape",
    [
        ({"data": -1}, {"data": 8}),
        ({"data": 8}, {"data": 8}),
        ({"data": -1, "model": 2}, {"data": 4, "model": 2}),
        ({"data": 4, "model": -1}, {"data": 4, "model": 2}),
    ],
)
def test_mesh_is_over_all_devices(asked: dict[str, int], shape: dict[str, int]) -> None:
    mesh = mesh_lib.make_mesh(asked)
    assert dict(mesh.shape) == shape
    assert mesh.axis_types == (AxisType.Auto,) * len(shape)
    assert {device.id for device in mesh.devices.flat} == set(range(8))


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"data": 3}, "does not multiply to the 8 devices"),
        ({"data": -1, "model": 3}, "does not multiply to the 8 devices"),
        ({"data": -1, "model": -1}, "at most one -1"),
        ({"data": -2}, "positive whole sizes"),
        ({"data": 8.0}, "positive whole sizes"),
        ({"model": 8}, "needs the axis 'data'"),
    ],
)
def test_mesh_that_cannot_be(asked: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh_lib.make_mesh(asked)


def test_batch_is_split_over_the_data_axis() -> None:
    mesh = mesh_lib.make_mesh({"data": 4, "model": 2})
    batch = mesh_lib.shard_batch({"image": np.arange(16).reshape(8, 2)}, mesh)["image"]
    assert batch.shape == (8, 2)
    rows = {tuple(shard.data[:, 0].tolist()) for shard in batch.addressable_shards}
    assert rows == {(0, 2), (4, 6), (8, 10), (12, 14)}
    everywhere = jax.device_put(np.arange(3), mesh_lib.replicated(mesh))
    assert all(shard.data.shape == (3,) for shard in everywhere.addressable_shards)


def test_batch_size_that_does_not_divide() -> None:
    mesh = mesh_lib.make_mesh({"data": -1})
    mesh_lib.check_divides("config.batch_size", 24, mesh)
    with pytest.raises(UserError, match="config.batch_size is 20, .* 8 devices .*; 16 or 24 would"):
        mesh_lib.check_divides("config.batch_size", 20, mesh)
    with pytest.raises(UserError, match="axis; 8 would"):
        mesh_lib.check_divides("config.batch_size", 7, mesh)
