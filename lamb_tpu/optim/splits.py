"""The split of one leaf inside `shard_map` or `pmap`, where a program has one part of it."""

import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from lamb_tpu.optim import trust_ratio
from lamb_tpu.optim.parameters import ParameterFacts
from lamb_tpu.optim.trust_ratio import AxisName, MeshAxes


class Split(NamedTuple):
    """A leaf's whole shape, and the mesh axes over which it is split.

    A leaf that is whole, as every leaf is under `jit`, has its own shape and is split along no
    axis.
    """

    axis_name: MeshAxes  # for norms and means of its layers
    # The next two are None where the mesh axes are known and the leaf's are not, as where
    # `axis_name` is a name and no `PartitionSpec`.
    shape: tuple[int, ...] | None  # of the whole leaf
    axes: tuple[tuple[str, ...], ...] | None  # for each axis of the leaf, the mesh axes

    def names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        """The mesh axes that split some of the leaf's axes, as far as they are known."""
        return tuple(name for axis in axes if self.axes for name in self.axes[axis])

    def part(self, array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """The part of an array that belongs to this part of the leaf.

        Args:
          array: every axis whole; the first ones go with `axes`, others with none.
          axes: axes of the leaf.
        """
        # An axis that several mesh axes split is cut in their order, the first one outermost, which
        # is how `axis_index` counts over a tuple.
        for place, axis in enumerate(axes):
            names = self.names((axis,))
            if names:
                size = array.shape[place] // math.prod(map(jax.lax.axis_size, names))
                start = jax.lax.axis_index(names) * size
                array = jax.lax.dynamic_slice_in_dim(array, start, size, place)
        return array


def split_of(
    axis_name: AxisName, path: str, shape: tuple[int, ...], facts: ParameterFacts
) -> Split:
    """The split of the leaf of which a part, of the given shape, is at hand.

    Raises ValueError for an axis name that is none, a spec with more axes than the leaf, and where
    the axes of a spec are not bound.
    """
    given = axis_name(path) if callable(axis_name) else axis_name
    # For norms, which must not be summed over devices that hold other layers. The next line asks
    # for all axes: a leaf that is split by layers only is not whole.
    names = trust_ratio.axes_of(axis_name, path, facts.layer_axes)
    if not trust_ratio.axes_of(axis_name, path):
        return whole(shape)
    if not isinstance(given, PartitionSpec):
        return Split(names, None, None)
    if len(given) > len(shape):
        raise ValueError(
            f"axis_name gives {given} for the parameter {path!r}, which has {len(shape)} axes"
        )
    # A spec may be shorter than the leaf; the axes behind it are whole.
    entries = [*given, *(None,) * (len(shape) - len(given))]
    axes = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    # `shape` is that of the part at hand: times the sizes of the mesh axes it is the whole leaf's.
    return Split(
        names,
        tuple(
            trust_ratio.over(lambda part, over: part * jax.lax.axis_size(over), size, names)
            for size, names in zip(shape, axes, strict=True)
        ),
        axes,
    )


def whole(shape: tuple[int, ...]) -> Split:
    """The split of a leaf that is not split."""
    return Split(None, tuple(shape), ((),) * len(shape))
