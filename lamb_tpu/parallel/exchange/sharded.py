"""Connects an exchange with the step: shards the sums and the residual over the mesh.

On a mesh with several devices along both data and fsdp, gradients are first summed over fsdp, in
their dtype, by a reduce-scatter that leaves each device a shard of every leaf. The exchange sums
these shards over data only. If the sum of a leaf must be replicated, its shards are then gathered
over fsdp. So an exchange that sends few bits works between slices, and the fast network within a
slice sends all bits. Exchanges that only cast sum over both axes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lamb_tpu.optim import parameters
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.collectives import replaced
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.cast import Cast
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class ShardedExchange:
    """An exchange between the devices of a layout; its sums are sharded like the optimizer's state."""

    layout: Layout
    exchange: Exchange  # sums gradients, or their shards, over its axes
    full_precision: tuple[str, ...] = ()  # regexes over paths of leaves to sum in float32

    @property
    def inner(self) -> str | None:
        """The axis over which gradients are summed before the exchange; None if there is none."""
        state = mesh_lib.state_axis(self.layout.mesh)
        return None if state in self.exchange.axes else state

    @property
    def keeps_residual(self) -> bool:
        """True if the exchange may have a residual."""
        return not isinstance(self.exchange, Cast)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of devices over which the exchange sums, and the size of the inner axis."""
        shards = mesh_lib.num_batch_shards(self.layout.mesh)
        return self.exchange.num_devices, shards // self.exchange.num_devices

    def at(self, update: int) -> "ShardedExchange":
        """Returns this object with the exchange for an update, see `Exchange.at`."""
        return dataclasses.replace(self, exchange=self.exchange.at(update))

    def plain(self) -> "ShardedExchange":
        """Returns an exchange with the same layout that sends gradients unchanged."""
        axes = mesh_lib.batch_axes(self.layout.mesh)
        return ShardedExchange(self.layout, Cast(axes, mesh_lib.num_batch_shards(self.layout.mesh)))

    def init(self, params: Params) -> Residual:
        """Returns the residuals of all devices before the first update, as the state stores them.

        Leaves of `device` and `split` are concatenated along their first axis over all devices. With
        a separate axis of devices, a device's vector would be a matrix of one row, which a TPU pads
        to two rows. If there is an inner axis, it is an additional first axis of leaves of `whole`.

        Args:
          params: global arrays or `jax.ShapeDtypeStruct`s.
        """
        one = self.exchange.init(self._seen(params))
        outer, inner = self.sizes

        def copies(tree: PyTree, count: int) -> Any:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)

        def joined(tree: PyTree) -> Any:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), copies(tree, outer * inner))

        return Residual(
            joined(one.device),
            joined(one.split),
            copies(one.whole, inner) if self.inner else jax.tree.map(jnp.asarray, one.whole),
        )

    def chosen(self, params: Params, residual: Residual) -> "ShardedExchange":
        """Returns this object with the exchange that `Exchange.chosen` returns.

        `residual` has the residuals of all devices, as `init` returns them.
        """
        chosen = self.exchange.chosen(self._seen(params), residual.whole)
        return dataclasses.replace(self, exchange=chosen)

    def specs(self, residual: Residual) -> Residual:
        """Returns the `PartitionSpec` of each array of a residual that `init` returns."""
        every = PartitionSpec(mesh_lib.batch_axes(self.layout.mesh))
        within = PartitionSpec(self.inner) if self.inner else PartitionSpec()
        specs = zip((every, every, within), residual, strict=True)
        return Residual(*(jax.tree.map(lambda _, spec=spec: spec, tree) for spec, tree in specs))

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        """Returns the sums over devices, sharded like the optimizer's state, and the new residual.

        This method is called inside shard_map.

        Args:
          grads: this device's share of the gradient, with full leaves.
          residual: this device's shard of what `init` returns.
        """
        leaves, treedef = jax.tree.flatten(grads)
        places = jax.tree.leaves(self.layout.split_axes(self.layout.moments))
        narrow = self._narrow(grads)
        wide = [i for i in range(len(leaves)) if i not in narrow]
        found = self._cast(leaves, places, wide, jnp.float32)
        if isinstance(self.exchange, Cast):
            found = self._cast(found, places, narrow, self.exchange.dtype)
        else:
            given, axes = [leaves[i] for i in narrow], [places[i] for i in narrow]
            every = self._cuts(leaves)
            cuts = [every[i] for i in narrow]
            parts = replaced([None] * len(leaves), narrow, self._within(given, cuts))
            summed, residual = self._exchanged(treedef.unflatten(parts), residual)
            sums = self._place(jax.tree.leaves(summed), [x.shape for x in given], cuts, axes)
            found = replaced(found, narrow, sums)
        return treedef.unflatten(found), residual

    def _seen(self, params: Params) -> Any:
        """Returns the shapes of the arrays that the exchange sums; None for leaves in full precision."""
        leaves, treedef = jax.tree.flatten(params)
        narrow, axes = self._narrow(params), self._cuts(leaves)
        seen = [
            jax.ShapeDtypeStruct(self._part_shape(leaves[i].shape, axes[i]), leaves[i].dtype)
            for i in narrow
        ]
        return treedef.unflatten(replaced([None] * len(leaves), narrow, seen))

    def _narrow(self, tree: PyTree) -> list[int]:
        """Returns the indices of the leaves that the exchange sums, not those in full precision."""
        return [
            number
            for number, path in enumerate(parameters.leaf_paths(tree))
            if not any(parameters.matches(pattern, path) for pattern in self.full_precision)
        ]

    def _cuts(self, leaves: list[Any]) -> list[int]:
        """Returns for each leaf the axis along which it is cut over the inner axis.

        A leaf without an axis of divisible length gets -1, and is cut as a padded flat vector.
        """
        places = jax.tree.leaves(self.layout.split_axes(self.layout.moments))
        count = self.sizes[1]
        return [
            place
            if place >= 0
            else max(
                (axis for axis, size in enumerate(leaf.shape) if size and size % count == 0),
                default=-1,
            )
            for leaf, place in zip(leaves, places, strict=True)
        ]

    def _part_shape(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Returns the shape of a leaf as the exchange sees it: a shard if there is an inner axis."""
        if self.inner is None:
            return shape
        count = self.sizes[1]
        if axis < 0:
            return (-(-math.prod(shape) // count),)
        return collectives.part_shape(shape, axis, count)

    def _cast(
        self, leaves: list[Any], axes: list[int], numbers: list[int], dtype: Any
    ) -> list[Any]:
        """Replaces the leaves with the indices `numbers` by their sums over all devices, sharded.

        Values are sent and added in `dtype`. Split leaves are sent together in a few buckets, see
        `collectives`. Replicated leaves are summed together.
        """
        mesh = self.layout.mesh
        all_axes, state_axis = mesh_lib.batch_axes(mesh), mesh_lib.state_axis(mesh)
        split = [i for i in numbers if axes[i] >= 0]
        whole = [i for i in numbers if axes[i] < 0]
        parts = collectives.reduce_scatter(
            [leaves[i] for i in split], [axes[i] for i in split], state_axis, dtype
        )
        # Sum the shards, which are small, over the outer batch axes.
        if outer := all_axes[:-1]:
            parts = collectives.all_reduce(parts, outer, dtype)
        sums = collectives.all_reduce([leaves[i] for i in whole], all_axes, dtype)
        return replaced(leaves, split + whole, parts + sums)

    def _within(self, leaves: list[Any], cuts: list[int]) -> list[Any]:
        """Sums leaves over the inner axis, if there is one; returns this device's shards."""
        if self.inner is None:
            return leaves
        count = self.sizes[1]
        # A leaf without an axis of divisible length is cut as a padded vector.
        whole = [
            leaf if axis >= 0 else jnp.pad(leaf.ravel(), (0, -leaf.size % count))
            for leaf, axis in zip(leaves, cuts, strict=True)
        ]
        return collectives.reduce_scatter(whole, [max(axis, 0) for axis in cuts], self.inner)

    def _exchanged(self, parts: Any, residual: Residual) -> tuple[Any, Residual]:
        """Calls the exchange; takes and returns one device's shard of the residual of `init`."""
        shapes = jax.eval_shape(self.exchange.init, parts)

        def own(leaf: jax.Array, one: jax.ShapeDtypeStruct) -> jax.Array:
            # In the residual of `init`, a scalar is a vector, and `whole` has an inner axis.
            return leaf.reshape(one.shape)

        sums, found = self.exchange.reduce(parts, jax.tree.map(own, residual, shapes))
        device, split = jax.tree.map(jnp.atleast_1d, (found.device, found.split))
        whole = jax.tree.map(lambda leaf: leaf[None] if self.inner else leaf, found.whole)
        return sums, Residual(device, split, whole)

    def _place(
        self, sums: list[Any], shapes: list[tuple[int, ...]], cuts: list[int], places: list[int]
    ) -> list[Any]:
        """Shards sums like the optimizer's state: replicated, or split over the state axis.

        Args:
          sums: sums of leaves; if there is an inner axis, of this device's shards.
          shapes: the shapes of full leaves.
          cuts: the axis along which the inner axis split each leaf, see `_cuts`.
          places: the axis of each leaf that the state axis must split, -1 for replicated leaves.
        """
        if self.inner is None:
            state = mesh_lib.state_axis(self.layout.mesh)
            return [
                leaf if axis < 0 else collectives.local_part(leaf, axis, state)
                for leaf, axis in zip(sums, places, strict=True)
            ]
        # Leaves that the state axis must split are sharded already; gather the other leaves.
        missing = [i for i, axis in enumerate(places) if axis < 0]
        gathered = collectives.all_gather(
            [sums[i] for i in missing], [max(cuts[i], 0) for i in missing], self.inner
        )
        full = [
            leaf if cuts[i] >= 0 else leaf[: math.prod(shapes[i])].reshape(shapes[i])
            for i, leaf in zip(missing, gathered, strict=True)
        ]
        return replaced(sums, missing, full)


def any_not_finite(grads: PyTree, axes: tuple[str, ...]) -> jax.Array:
    """Returns whether an element of any device's gradient is NaN or infinite, inside shard_map.

    An exchange that sends few bits may turn such an element into a finite number.
    """
    own = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads)]
    bad = ~jnp.all(jnp.stack(own)) if own else jnp.bool_(False)
    return lax.psum(bad.astype(jnp.int32), axes) > 0
