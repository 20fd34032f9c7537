"""Meshes from a config, and batches spread over them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib


@pytest.mark.parametrize("size", [-1, 8])
def test_mesh_is_over_all_devices(size: int) -> None:
    mesh = mesh_lib.make_mesh({"data": size})
    assert dict(mesh.shape) == {"data": 8}
    assert mesh.axis_types == (AxisType.Auto,)
    assert {device.id for device in mesh.devices.flat} == set(range(8))


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"data": 3}, "config.mesh.data is 3; it must be -1 or the number of devices, 8"),
        ({"data": -2}, "config.mesh.data is -2"),
        ({"data": 8.0}, "config.mesh.data is 8.0"),
        ({"data": 4, "model": 2}, "has the axes data, model; it must have 'data' alone"),
        ({"model": 8}, "has the axes model; it must have 'data' alone"),
    ],
)
def test_mesh_that_cannot_be(asked: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh_lib.make_mesh(asked)


def test_batch_is_split_over_the_data_axis() -> None:
    mesh = mesh_lib.make_mesh({"data": -1})
    batch = mesh_lib.shard_batch({"image": np.arange(16).reshape(8, 2)}, mesh)["image"]
    assert batch.shape == (8, 2)
    rows = {tuple(shard.data[:, 0].tolist()) for shard in batch.addressable_shards}
    assert rows == {(i,) for i in range(0, 16, 2)}
    everywhere = jax.device_put(np.arange(3), mesh_lib.replicated(mesh))
    assert all(shard.data.shape == (3,) for shard in everywhere.addressable_shards)


def test_batch_size_that_does_not_divide() -> None:
    mesh = mesh_lib.make_mesh({"data": -1})
    mesh_lib.check_divides("config.batch_size", 24, mesh)
    with pytest.raises(UserError, match="config.batch_size is 20, .* 8 devices .*; 16 or 24 would"):
        mesh_lib.check_divides("config.batch_size", 20, mesh)
    with pytest.raises(UserError, match="axis; 8 would"):
        mesh_lib.check_divides("config.batch_size", 7, mesh)
