"""The device mesh, and the shardings of batches over it."""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError, listed, not_divisible, out_of_range
from lamb_tpu.parallel import torus

DATA_AXIS = "data"
# The axes that split a batch, outermost first. Optimizer state is split over the innermost axis, so
# that gathers of updated parameters stay among neighbours on a large mesh.
BATCH_AXES = (DATA_AXIS, "fsdp")
AXES = (*BATCH_AXES, "model", "sequence")


def make_mesh(
    shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None, group_replicas: int = 1
) -> Mesh:
    """Returns a mesh over all devices, in which neighbours on the physical torus are adjacent.

    The axes have the type Auto: the compiler places the collectives. If there are several slices,
    the data axis spans them, so its collectives cross the slower network between slices.

    Args:
      shape: sizes of the axes 'data' (required), 'fsdp' (which splits the batch and the state),
        'model' and 'sequence' (1 by default). One size may be -1 for the remaining devices. The mesh
        omits axes of size 1 other than 'data'.
      devices: devices of the mesh; None: all.
      group_replicas: number of devices that share one group of BatchNorm. If it is above 1 and the
        mesh has batch axes only, devices are in the order of `torus.order`.

    Raises:
      UserError: an axis is unknown or 'data' is missing; a size is invalid; the product of the sizes
        does not fit the number of devices; or 'data' is not a multiple of the number of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    planned = abstract_mesh(shape, len(devices))
    sizes, names, lengths = planned.shape, planned.axis_names, list(planned.axis_sizes)
    # Devices without the attribute, such as CPUs, count as one slice.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        if sizes[DATA_AXIS] % slices:
            problem = f"is not divisible by the {slices} slices, which this axis spans"
            raise UserError(
                "config.mesh.data", sizes[DATA_AXIS], problem, f"use a multiple of {slices}"
            )
        across = [slices if axis == DATA_AXIS else 1 for axis in names]
        within = [length // count for length, count in zip(lengths, across, strict=True)]
        # An axis's size within a slice times its size across slices is its size in the mesh.
        array = mesh_utils.create_hybrid_device_mesh(within, across, devices)
    elif group_replicas > 1 and set(names) <= set(BATCH_AXES):
        array = np.array(torus.order(devices, group_replicas)).reshape(lengths)
    else:
        # If a mesh axis is not a product of axes of the torus, axes of the torus must be split.
        array = mesh_utils.create_device_mesh(lengths, devices, allow_split_physical_axes=True)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def abstract_mesh(shape: Mapping[str, int], num_devices: int) -> AbstractMesh:
    """Returns the axes and sizes of the mesh that `make_mesh` makes; rejects invalid axes and sizes."""
    sizes = _sizes(shape, num_devices)
    names = tuple(axis for axis in AXES if sizes[axis] > 1 or axis == DATA_AXIS)
    return AbstractMesh(
        tuple(sizes[axis] for axis in names), names, axis_types=(AxisType.Auto,) * len(names)
    )


def _sizes(shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Returns the sizes of the axes in `AXES`, with -1 replaced."""
    if set(shape) - set(AXES) or DATA_AXIS not in shape:
        remedy = f"use data and, if needed, {listed(AXES[1:], 'and')}"
        raise UserError("config.mesh", dict(shape), "has an unknown axis or lacks 'data'", remedy)
    sizes = {axis: shape.get(axis, 1) for axis in AXES}
    for axis, size in sizes.items():
        if type(size) is not int or (size < 1 and size != -1):
            valid = "a whole number of at least 1, or -1 for the remaining devices"
            raise out_of_range(f"config.mesh.{axis}", size, valid)
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        problem = f"cannot take the remaining devices together with config.mesh.{free[0]}=-1"
        raise UserError(f"config.mesh.{free[1]}", -1, problem, "use -1 for only one axis")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    # Without -1 the product of the sizes is the number of devices; with it, the product divides it.
    if num_devices % fixed or (not free and fixed != num_devices):
        remedy = (
            f"use sizes whose product is {num_devices}, or -1 for one axis and other sizes whose "
            f"product divides {num_devices}"
        )
        raise UserError(
            "config.mesh", dict(shape), f"does not fit the {num_devices} device(s)", remedy
        )
    return sizes | dict.fromkeys(free, num_devices // fixed)


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the mesh axes that split a batch, outermost first."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def state_axis(mesh: Mesh) -> str:
    """Returns the axis over which ZeRO-1 splits optimizer state and FSDP also splits parameters."""
    return batch_axes(mesh)[-1]


def num_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of a batch: the product of the sizes of the batch axes."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache  # called for each update
def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array whose leading axis is split over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


@functools.cache
def stacked_sharding(mesh: Mesh, updates: int) -> NamedSharding:
    """Returns the sharding of batches (updates, rows, ...), or (rows, ...) if `updates` is 1."""
    if updates == 1:
        return batch_sharding(mesh)
    return NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh)))


def check_divides(key: str, size: int, parts: int, of: str) -> None:
    """Raises UserError for `key` unless `parts` divides `size`; `of` names `parts`: 'the 8 devices'."""
    if size % parts:
        raise not_divisible(key, size, parts, of)
