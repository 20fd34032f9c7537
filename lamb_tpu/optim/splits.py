"""Describes how a leaf is split over devices inside `shard_map` or `pmap`."""

import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from lamb_tpu.optim import trust_ratio
from lamb_tpu.optim.parameters import ParameterMetadata
from lamb_tpu.optim.trust_ratio import AxisName, MeshAxes


class Split(NamedTuple):
    """A leaf's full shape, and the mesh axes over which it is split.

    Under `jit` no leaf is split.
    """

    axis_name: MeshAxes  # the mesh axes over which norms and means of the leaf's layers are summed
    # `shape` and `axes` are None if the user gave the name of a mesh axis: without a
    # `PartitionSpec` it is unknown which axes of the leaf are split.
    shape: tuple[int, ...] | None  # the full shape
    axes: tuple[tuple[str, ...], ...] | None  # the mesh axes that split each axis of the leaf

    def names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        """Returns the mesh axes that split the given axes of the leaf, as far as these are known."""
        return tuple(name for axis in axes if self.axes for name in self.axes[axis])

    def shard(self, array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """Returns this device's shard of an array whose first axes are the leaf's `axes`."""
        # If several mesh axes split one axis of the leaf, the first mesh axis is the outermost.
        # `axis_index` of a tuple has the same order.
        for position, axis in enumerate(axes):
            names = self.names((axis,))
            if names:
                size = array.shape[position] // math.prod(map(jax.lax.axis_size, names))
                start = jax.lax.axis_index(names) * size
                array = jax.lax.dynamic_slice_in_dim(array, start, size, position)
        return array


def split_of(
    axis_name: AxisName, path: str, shape: tuple[int, ...], metadata: ParameterMetadata
) -> Split:
    """Returns the split of a leaf, given the shape of a shard; raises ValueError for a wrong spec."""
    given = axis_name(path) if callable(axis_name) else axis_name
    # `names` are the mesh axes for norms. They exclude mesh axes that split layer axes, because norms
    # of different layers must not be added. The next condition includes these mesh axes: a leaf that is
    # only split along its layers is split too.
    names = trust_ratio.axes_of(axis_name, path, metadata.layer_axes)
    if not trust_ratio.axes_of(axis_name, path):
        return unsplit(shape)
    if not isinstance(given, PartitionSpec):
        return Split(names, None, None)
    if len(given) > len(shape):
        raise ValueError(
            f"axis_name={given} has more entries than the parameter {path!r} has axes, {len(shape)}"
        )
    # A spec may be shorter than the leaf; the other axes are not split.
    entries = [*given, *(None,) * (len(shape) - len(given))]
    axes = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    # Multiply the shape of the shard by the sizes of the mesh axes.
    return Split(
        names,
        tuple(
            trust_ratio.over(lambda shard, over: shard * jax.lax.axis_size(over), size, names)
            for size, names in zip(shape, axes, strict=True)
        ),
        axes,
    )


def unsplit(shape: tuple[int, ...]) -> Split:
    """Returns the `Split` of a leaf that is not split."""
    return Split(None, tuple(shape), ((),) * len(shape))
