"""The device mesh, and batches as global arrays over it."""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError
from lamb_tpu.parallel import torus

DATA_AXIS = "data"
# The axes that split a batch, outermost first. State is split over the innermost of them, so that
# on a large mesh its gathers stay among neighbours.
BATCH_AXES = (DATA_AXIS, "fsdp")
AXES = (*BATCH_AXES, "model", "sequence")


def make_mesh(
    shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None, group_replicas: int = 1
) -> Mesh:
    """Returns a mesh over all devices, with neighbours on the physical torus next to each other.

    The axes are Auto: the compiler places the collectives. Several slices are laid along the data
    axis, whose collectives then cross the slower network between slices.

    Args:
      shape: size of 'data' and, where they are not 1, of 'fsdp' (which splits the batch and the
        state), 'model' and 'sequence'. One size may be -1: it takes the remaining devices. Axes of
        size 1 other than 'data' are left out of the mesh.
      devices: devices of the mesh; None: all.
      group_replicas: devices that share one group of BatchNorm. With several, and no axes but those
        of the batch, devices are in the order of `torus.order`.

    Raises:
      UserError: an axis is unknown or missing, or the sizes do not multiply to the number of
        devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = _sizes(shape, len(devices))
    names = tuple(axis for axis in AXES if sizes[axis] > 1 or axis == DATA_AXIS)
    lengths = [sizes[axis] for axis in names]
    # Devices without the attribute, such as CPUs, count as one slice.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        if sizes[DATA_AXIS] % slices:
            raise UserError(
                f"config.mesh.data is {sizes[DATA_AXIS]}; the {slices} slices lie along that axis "
                f"and must divide it"
            )
        across = [slices if axis == DATA_AXIS else 1 for axis in names]
        within = [length // count for length, count in zip(lengths, across, strict=True)]
        # Sizes within a slice and over slices multiply to those of the mesh.
        array = mesh_utils.create_hybrid_device_mesh(within, across, devices)
    elif group_replicas > 1 and set(names) <= set(BATCH_AXES):
        array = np.array(torus.order(devices, group_replicas)).reshape(lengths)
    else:
        # An axis that is not a product of the torus' own axes has to be cut out of them.
        array = mesh_utils.create_device_mesh(lengths, devices, allow_split_physical_axes=True)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _sizes(shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Sizes of the axes in `AXES`, with -1 replaced."""
    if set(shape) - set(AXES) or DATA_AXIS not in shape:
        raise UserError(
            f"config.mesh has the axes {', '.join(shape)}; it must have data and may have "
            f"{', '.join(AXES[1:])}"
        )
    sizes = {axis: shape.get(axis, 1) for axis in AXES}
    for axis, size in sizes.items():
        if type(size) is not int or (size < 1 and size != -1):
            raise UserError(
                f"config.mesh.{axis} is {size!r}; it must be a whole number of at least 1, or -1 "
                "for what the other axes leave"
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(
            f"config.mesh.{free[0]} and config.mesh.{free[1]} are both -1; only one axis can take "
            "what the others leave"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    # A size of -1 takes what the others leave, so they must divide the devices; without one they
    # must multiply to them.
    if num_devices % fixed or (not free and fixed != num_devices):
        asked = ", ".join(f"{axis}={size}" for axis, size in shape.items())
        raise UserError(
            f"config.mesh is {asked} and there are {num_devices} device(s); the sizes must "
            "multiply to their number, or one of them be -1 and the others divide it"
        )
    return sizes | dict.fromkeys(free, num_devices // fixed)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes over which a batch is split, outermost first."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def state_axis(mesh: Mesh) -> str:
    """The axis over which ZeRO-1 and FSDP split."""
    return batch_axes(mesh)[-1]


def num_batch_shards(mesh: Mesh) -> int:
    """Number of parts into which a batch is split."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache  # asked for each update
def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of an array whose leading axis is split over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def check_divides(key: str, size: int, parts: int, of: str) -> None:
    """Refuses a number of examples that is not a multiple of `parts`; the error names `key`."""
    if size % parts:
        below, above = size // parts * parts, -(-size // parts) * parts
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(f"{key} is {size}, which does not divide over {of}; {near} would")


@functools.cache  # asked for each update
def local_rows(batch_size: int, mesh: Mesh) -> np.ndarray:
    """Rows of a global batch that this process' devices hold, ascending, each once.

    They need not be consecutive on a mesh that follows a torus. Several processes hold the same
    rows if an axis that does not split the batch crosses processes.
    """
    devices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    # (start, stop, step) of each device's rows; a set, because replicas hold the same rows.
    held = {index[0].indices(batch_size) for index in devices.values() if index is not None}
    rows = np.concatenate([np.arange(*bounds) for bounds in sorted(held)])
    rows.setflags(write=False)  # the next caller gets the same array
    return rows


def microbatch_order(batch_size: int, num_shards: int, steps: int) -> np.ndarray:
    """Order of a global batch's examples in the array that is split over a mesh.

    Every shard is cut into `steps` microbatches. In this order microbatch j is the j-th run of
    consecutive examples for any number of shards, and no example has to move between devices.

    >>> microbatch_order(8, 2, 2)
    array([0, 1, 4, 5, 2, 3, 6, 7])
    """
    # Axes: (microbatch, shard, row) to (shard, microbatch, row).
    return np.arange(batch_size).reshape(steps, num_shards, -1).swapaxes(0, 1).ravel()


def shard_batch(
    batch: Mapping[str, np.ndarray], batch_size: int, mesh: Mesh
) -> dict[str, jax.Array]:
    """Returns a global batch, split over the batch axes, from this process' rows.

    Args:
      batch: fields of shape (rows, ...), with the rows of `local_rows`.
      batch_size: number of rows of the global batch.
      mesh: the mesh over all devices.
    """
    sharding, rows = batch_sharding(mesh), local_rows(batch_size, mesh)

    def place(value: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # the batch is split along its first axis
            # `index` counts rows of the global batch, `value` those of this process. A device's
            # rows are consecutive, and `rows` ascend, so they are consecutive in `value` too.
            start = np.searchsorted(rows, index[0].start or 0)
            stop = batch_size if index[0].stop is None else index[0].stop
            return value[start : start + stop - (index[0].start or 0)]

        shape = (batch_size, *value.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return {name: place(value) for name, value in batch.items()}
