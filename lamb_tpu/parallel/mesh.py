"""The device mesh, and batches as global arrays over it."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError

DATA_AXIS = "data"


def make_mesh(shape: Mapping[str, int]) -> Mesh:
    """A mesh over all devices, for example `{'data': -1}`; one axis may be -1, meaning the rest.

    The axes are Auto: the compiler places the collectives.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    sizes = dict(shape)
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if DATA_AXIS not in sizes:
        raise UserError(f"config.mesh ({asked}) needs the axis 'data'")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or not all(
        type(size) is int and (size > 0 or size == -1) for size in sizes.values()
    ):
        raise UserError(
            f"config.mesh ({asked}) must have positive whole sizes, at most one -1 (the rest)"
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    if free and devices % known == 0:
        sizes[free[0]] = devices // known
    if math.prod(sizes.values()) != devices:
        raise UserError(f"config.mesh ({asked}) does not multiply to the {devices} devices here")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


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
