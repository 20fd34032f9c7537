"""Tests meshes from `config.mesh`, and batches that are split over a mesh."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.rows import shard_batch
from tests.raising import rejected

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
    "asked, axis, problem",
    [
        ({"data": 3}, "", "does not fit the 8 device"),
        ({"data": -2}, ".data", "is out of range"),
        ({"data": 8.0}, ".data", "is out of range"),
        ({"data": 4, "model": 0}, ".model", "is out of range"),
        ({"data": -1, "model": 3}, "", "does not fit the 8 device"),
        ({"data": -1, "model": -1}, ".model", "together with config.mesh.data=-1"),
        ({"data": 8, "tensor": 1}, "", "has an unknown axis or lacks 'data'"),
        ({"model": 8}, "", "has an unknown axis or lacks 'data'"),
    ],
)
def test_rejects_a_mesh(asked: dict[str, int], axis: str, problem: str) -> None:
    value = asked[axis[1:]] if axis else asked
    with rejected(f"config.mesh{axis}", value, problem):
        mesh_lib.make_mesh(asked)


def chip(
    monkeypatch: pytest.MonkeyPatch, number: int, of_slice: int, kind: str, coords: tuple[int, ...]
) -> SimpleNamespace:
    """Returns a stand-in for a TPU device, and replaces `Mesh`, which needs real devices."""
    monkeypatch.setattr(mesh_lib, "Mesh", lambda devices, names, axis_types: (devices, names))
    return SimpleNamespace(
        id=number,
        slice_index=of_slice,
        process_index=of_slice,
        platform="tpu",
        device_kind=kind,
        coords=coords,
        core_on_chip=0,
    )


def slices(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> list[SimpleNamespace]:
    """Returns the devices of several slices."""
    return [
        chip(monkeypatch, 16 * number + core, number, "TPU v4", (core % 4, core // 4, 0))
        for number, count in enumerate(counts)
        for core in range(count)
    ]


def test_slices_lie_along_the_data_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = slices(monkeypatch, [16, 16])
    array, names = mesh_lib.make_mesh({"data": -1, "model": 4}, devices)
    assert names == ("data", "model") and array.shape == (8, 4)
    assert [{device.slice_index for device in row} for row in array] == [{0}] * 4 + [{1}] * 4
    with rejected("config.mesh.data", 1, "is not divisible by the 2 slices", "multiple of 2"):
        mesh_lib.make_mesh({"data": 1, "model": 32}, devices)


def test_large_groups_of_batch_norm_are_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    chips = [
        chip(monkeypatch, 16 * row + column, 0, "TPU v5 lite", (column, row, 0))
        for row in range(16)
        for column in range(16)
    ]
    for shape in ({"data": -1}, {"data": -1, "fsdp": 4}):
        array, names = mesh_lib.make_mesh(shape, chips, group_replicas=64)
        assert names == tuple(shape) and array.size == 256
        for group in array.reshape(4, 64):
            coords = np.array([device.coords[:2] for device in group])
            assert (np.ptp(coords, axis=0) == 7).all()  # 8 x 8
    # Small groups are paths from neighbour to neighbour.
    array, _ = mesh_lib.make_mesh({"data": -1}, chips, group_replicas=8)
    coords = np.array([device.coords for device in array])
    assert (np.abs(np.diff(coords, axis=0)).sum(1) == 1).all()


def test_batch_is_split_over_the_batch_axes() -> None:
    mesh = mesh_lib.make_mesh({"data": 2, "fsdp": 2, "model": 2})
    assert mesh_lib.batch_axes(mesh) == ("data", "fsdp")
    assert mesh_lib.num_batch_shards(mesh) == 4 and mesh_lib.state_axis(mesh) == "fsdp"
    value = np.arange(16).reshape(8, 2)
    batch = shard_batch({"image": value}, 8, mesh)["image"]
    np.testing.assert_array_equal(batch, value)
    rows = [tuple(shard.data[:, 0].tolist()) for shard in batch.addressable_shards]
    assert sorted(rows) == sorted([(i, i + 2) for i in (0, 4, 8, 12)] * 2)
    everywhere = jax.device_put(np.arange(3), mesh_lib.replicated(mesh))
    assert all(shard.data.shape == (3,) for shard in everywhere.addressable_shards)


def test_batch_size_that_does_not_divide() -> None:
    mesh_lib.check_divides("config.batch_size", 24, 8, "the 8 devices")
    with rejected("config.batch_size", 20, "by the 8 devices", "use 16 or 24"):
        mesh_lib.check_divides("config.batch_size", 20, 8, "the 8 devices")
    with rejected("config.batch_size", 7, "by the 8 devices", "use 8"):
        mesh_lib.check_divides("config.batch_size", 7, 8, "the 8 devices")
