"""The device mesh, and batches as global arrays over it."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError

DATA_AXIS = "data"


def make_mesh(shape: Mapping[str, int]) -> Mesh:
    """A mesh over all devices, with the one axis 'data'; its size is -1 or their number.

    The axis is Auto: the compiler places the collectives.

    Raises:
      UserError: another axis, or another size.
    """
    devices = jax.device_count()
    if set(shape) != {DATA_AXIS}:
        raise UserError(f"config.mesh has the axes {', '.join(shape)}; it must have 'data' alone")
    if type(shape[DATA_AXIS]) is not int or shape[DATA_AXIS] not in (-1, devices):
        raise UserError(
            f"config.mesh.data is {shape[DATA_AXIS]!r}; it must be -1 or the number of devices, "
            f"{devices}"
        )
    return jax.make_mesh((devices,), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis is split over the data axis."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def check_divides(key: str, batch_size: int, mesh: Mesh) -> None:
    """Refuses a global batch that the data axis does not divide, naming the config's `key`."""
    parts = mesh.shape[DATA_AXIS]
    if batch_size % parts:
        below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{key} is {batch_size}, which does not divide over the {parts} devices of the data "
            f"axis; {near} would"
        )


def shard_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process' rows of a batch, (rows, ...) each, as global arrays over the data axis."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in batch.items()
    }
