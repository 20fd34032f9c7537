"""Meshes from a config, and batches spread over them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib

ONES = {"fsdp": 1, "model": 1, "sequence": 1}


@pytest.mark.parametrize(
    "asked, shape",
    [
        ({"data": -1}, {"data": 8}),
        ({"data": 8, **ONES}, {"data": 8}),
        ({"data": -1, **ONES, "model": 4}, {"data": 2, "model": 4}),
        ({"data": 2, **ONES, "fsdp": -1}, {"data": 2, "fsdp": 4}),
        (
            {"data": 1, "fsdp": 2, "model": 2, "sequence": 2},
            {"data": 1, "fsdp": 2, "model": 2, "sequence": 2},
        ),
    ],
)
def test_mesh_is_over_all_devices(asked: dict[str, int], shape: dict[str, int]) -> None:
    mesh = mesh_lib.make_mesh(asked)
    assert dict(mesh.shape) == shape and tuple(mesh.shape) == tuple(shape)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert {device.id for device in mesh.devices.flat} == set(range(8))


def test_some_devices() -> None:
    mesh = mesh_lib.make_mesh({"data": -1}, jax.devices()[2:5])
    assert [device.id for device in mesh.devices.flat] == [2, 3, 4]


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"data": 3}, "config.mesh is data=3 and there are 8 device"),
        ({"data": -2}, "config.mesh.data is -2; it must be a whole number of at least 1, or -1"),
        ({"data": 8.0}, "config.mesh.data is 8.0"),
        ({"data": 4, "model": 0}, "config.mesh.model is 0"),
        ({"data": -1, "model": 3}, "config.mesh is data=-1, model=3 and there are 8 device"),
        ({"data": -1, "model": -1}, "config.mesh.data and config.mesh.model are both -1"),
        ({"data": 8, "tensor": 1}, "has the axes data, tensor; it must have data and may have fsd"),
        ({"model": 8}, "has the axes model; it must have data"),
    ],
)
def test_mesh_that_cannot_be(asked: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh_lib.make_mesh(asked)


def slices(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> list[SimpleNamespace]:
    """Stand-ins for TPU devices of several slices; the mesh's own class would want real ones."""
    monkeypatch.setattr(mesh_lib, "Mesh", lambda devices, names, axis_types: (devices, names))
    return [
        SimpleNamespace(
            id=16 * number + core,
            slice_index=number,
            process_index=number,
            platform="tpu",
            device_kind="TPU v4",
            coords=(core % 4, core // 4, 0),
            core_on_chip=0,
        )
        for number, count in enumerate(counts)
        for core in range(count)
    ]


def test_slices_lie_along_the_data_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = slices(monkeypatch, [16, 16])
    array, names = mesh_lib.make_mesh({"data": -1, "model": 4}, devices)
    assert names == ("data", "model") and array.shape == (8, 4)
    assert [{device.slice_index for device in row} for row in array] == [{0}] * 4 + [{1}] * 4
    with pytest.raises(UserError, match="config.mesh.data is 1; the 2 slices lie along that axis"):
        mesh_lib.make_mesh({"data": 1, "model": 32}, devices)


def test_large_groups_of_batch_norm_are_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    chips = [
        SimpleNamespace(
            id=16 * row + column,
            slice_index=0,
            process_index=0,
            platform="tpu",
            device_kind="TPU v5 lite",
            coords=(column, row, 0),
            core_on_chip=0,
        )
        for row in range(16)
        for column in range(16)
    ]
    monkeypatch.setattr(mesh_lib, "Mesh", lambda devices, names, axis_types: (devices, names))
    for shape in ({"data": -1}, {"data": -1, "fsdp": 4}):
        array, names = mesh_lib.make_mesh(shape, chips, group_replicas=64)
        assert names == tuple(shape) and array.size == 256
        for group in array.reshape(4, 64):
            coords = np.array([device.coords[:2] for device in group])
            assert (np.ptp(coords, axis=0) == 7).all()  # 8 x 8
    # Small ones are runs of neighbours.
    array, _ = mesh_lib.make_mesh({"data": -1}, chips, group_replicas=8)
    coords = np.array([device.coords for device in array])
    assert (np.abs(np.diff(coords, axis=0)).sum(1) == 1).all()


def test_microbatches_are_runs_of_examples_on_any_devices() -> None:
    for shards in (1, 2, 4):
        order = mesh_lib.microbatch_order(24, shards, 3).reshape(shards, 3, -1)
        assert sorted(order.ravel().tolist()) == list(range(24))
        for number in range(3):
            run = order[:, number].ravel().tolist()
            assert run == list(range(8 * number, 8 * number + 8))


def test_batch_is_split_over_the_batch_axes() -> None:
    mesh = mesh_lib.make_mesh({"data": 2, "fsdp": 2, "model": 2})
    assert mesh_lib.batch_axes(mesh) == ("data", "fsdp")
    assert mesh_lib.num_batch_shards(mesh) == 4 and mesh_lib.state_axis(mesh) == "fsdp"
    value = np.arange(16).reshape(8, 2)
    batch = mesh_lib.shard_batch({"image": value}, 8, mesh)["image"]
    np.testing.assert_array_equal(batch, value)
    rows = [tuple(shard.data[:, 0].tolist()) for shard in batch.addressable_shards]
    assert sorted(rows) == sorted([(i, i + 2) for i in (0, 4, 8, 12)] * 2)
    everywhere = jax.device_put(np.arange(3), mesh_lib.replicated(mesh))
    assert all(shard.data.shape == (3,) for shard in everywhere.addressable_shards)


def test_rows_of_a_process_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_lib.make_mesh({"data": -1})
    np.testing.assert_array_equal(mesh_lib.local_rows(16, mesh), np.arange(16))

    class OfOneProcess(NamedSharding):
        def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
            own = {1, 2, 6}
            every = super().devices_indices_map(shape)
            return {device: index for device, index in every.items() if device.id in own}

    sharding = OfOneProcess(mesh, PartitionSpec("data"))
    monkeypatch.setattr(mesh_lib, "batch_sharding", lambda mesh: sharding)
    uncached = mesh_lib.local_rows.__wrapped__
    assert uncached(16, mesh).tolist() == [2, 3, 4, 5, 12, 13]


def test_batch_size_that_does_not_divide() -> None:
    mesh_lib.check_divides("config.batch_size", 24, 8, "the 8 devices")
    with pytest.raises(UserError, match="config.batch_size is 20, .* 8 devices; 16 or 24 would"):
        mesh_lib.check_divides("config.batch_size", 20, 8, "the 8 devices")
    with pytest.raises(UserError, match="devices; 8 would"):
        mesh_lib.check_divides("config.batch_size", 7, 8, "the 8 devices")
