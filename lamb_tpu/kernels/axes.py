"""Axes of the current mesh that split the rows of a batch."""

import jax
from jax.sharding import AxisType

# Axes that split the values of an example: heads and hidden units, and the sequence.
WITHIN_EXAMPLES = ("model", "sequence")


def of_rows() -> tuple[str, ...]:
    """Returns the axes over which the compiler splits the rows of a batch.

    The mesh is set by `jax.set_mesh` or `jax.sharding.use_abstract_mesh`; without a mesh, the result
    is empty. Inside a shard_map, the axes of this shard_map are left out, because there a device
    only sees its own rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        axis
        for axis, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type == AxisType.Auto and axis not in WITHIN_EXAMPLES
    )
