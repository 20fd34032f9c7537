"""Axes of the current mesh: which of them split the rows of a batch."""

import jax
from jax.sharding import AxisType

# Axes that split an example's values: the heads and hidden units of a network, and its sequence.
WITHIN_EXAMPLES = ("model", "sequence")


def of_rows() -> tuple[str, ...]:
    """Returns the axes over which the compiler splits the rows of a batch.

    The mesh is that of `jax.set_mesh` or `jax.sharding.use_abstract_mesh`. There are none without a
    mesh, and none inside shard_map, where a device sees its own rows only.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and axis not in WITHIN_EXAMPLES
    )
