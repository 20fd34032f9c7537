"""Any exchange in the step: its sums are placed as the optimizer's state, its residual is kept.

On a mesh with the axes data and fsdp, gradients are first summed over fsdp, in their own dtype, by
a reduce-scatter that leaves each device a part of every leaf. The exchange sums these parts over
data alone. Where a leaf is to be whole, its parts are gathered over fsdp again. So an exchange that
sends few bits works between slices, and the fast network within a slice sends all bits.
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
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.cast import Cast
from lamb_tpu.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class Placed:
    """An exchange between the devices of a layout.

    Attributes:
      layout: the shardings of parameters and moments.
      exchange: sums gradients, or their parts, over its axes.
      full_precision: regular expressions over paths; leaves that one of them matches are summed in
        float32.
    """

    layout: Layout
    exchange: Exchange
    full_precision: tuple[str, ...] = ()

    @property
    def inner(self) -> str | None:
        """The axis over which gradients are summed before the exchange; None without one."""
        state = mesh_lib.state_axis(self.layout.mesh)
        return None if state in self.exchange.axes else state

    @property
    def keeps_residual(self) -> bool:
        """True for an exchange that may keep a residual."""
        return not isinstance(self.exchange, Cast)

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of devices over which the exchange sums, and within which it does not."""
        shards = mesh_lib.num_batch_shards(self.layout.mesh)
        return self.exchange.num_devices, shards // self.exchange.num_devices

    def at(self, update: int) -> "Placed":
        """Returns the exchange of the stage of an update, see `Exchange.at`."""
        return dataclasses.replace(self, exchange=self.exchange.at(update))

    def plain(self) -> "Placed":
        """Returns an exchange of the same layout that sends gradients as they are."""
        axes = mesh_lib.batch_axes(self.layout.mesh)
        return Placed(self.layout, Cast(axes, mesh_lib.num_batch_shards(self.layout.mesh)))

    def init(self, params: Any) -> Residual:
        """Returns the residuals of all devices before the first update, as the state keeps them.

        Leaves of `device` and `split` are those of all devices of the batch, joined along their
        first axis: with an axis of the devices in front, a device's vector would be a row, which a
        TPU pads to two. Those of `whole` have an axis of the devices of the inner axis in front, if
        there is one.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, whole.
        """
        one = self.exchange.init(self._seen(params))
        outer, inner = self.sizes

        def copies(tree: Any, count: int) -> Any:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)

        def joined(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), copies(tree, outer * inner))

        return Residual(
            joined(one.device),
            joined(one.split),
            copies(one.whole, inner) if self.inner else jax.tree.map(jnp.asarray, one.whole),
        )

    def chosen(self, params: Any, residual: Residual) -> "Placed":
        """Returns this with the exchange that `Exchange.chosen` returns for a state's residual.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, whole.
          residual: of all devices, as `init` returns it.
        """
        chosen = self.exchange.chosen(self._seen(params), residual.whole)
        return dataclasses.replace(self, exchange=chosen)

    def specs(self, residual: Residual) -> Residual:
        """Returns the spec of each array of a residual that `init` returns."""
        every = PartitionSpec(mesh_lib.batch_axes(self.layout.mesh))
        within = PartitionSpec(self.inner) if self.inner else PartitionSpec()
        return Residual(
            *(
                jax.tree.map(lambda _, spec=spec: spec, tree)
                for tree, spec in zip(residual, (every, every, within), strict=True)
            )
        )

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        """Returns the sums over devices, placed as the optimizer's state, and the new residual.

        It runs inside shard_map.

        Args:
          grads: this device's share of the gradient, whole leaves.
          residual: this device's part of what `init` returns.
        """
        leaves, treedef = jax.tree.flatten(grads)
        places = jax.tree.leaves(self.layout.split_axes(self.layout.moments))
        narrow = self._narrow(grads)
        wide = [i for i in range(len(leaves)) if i not in narrow]
        found = dict(
            zip(
                wide,
                self._cast([leaves[i] for i in wide], [places[i] for i in wide], jnp.float32),
                strict=True,
            )
        )
        if isinstance(self.exchange, Cast):
            sums = self._cast(
                [leaves[i] for i in narrow], [places[i] for i in narrow], self.exchange.dtype
            )
            found |= zip(narrow, sums, strict=True)
        else:
            cuts = self._cuts(leaves)
            parts = self._within([leaves[i] for i in narrow], [cuts[i] for i in narrow])
            placed = dict(zip(narrow, parts, strict=True))
            summed, residual = self._exchanged(
                treedef.unflatten([placed.get(i) for i in range(len(leaves))]), residual
            )
            found |= zip(
                narrow,
                self._place(
                    jax.tree.leaves(summed),
                    [leaves[i].shape for i in narrow],
                    [cuts[i] for i in narrow],
                    [places[i] for i in narrow],
                ),
                strict=True,
            )
        return treedef.unflatten([found[i] for i in range(len(leaves))]), residual

    def _seen(self, params: Any) -> Any:
        """Returns the shapes of what the exchange sums, None for leaves that it does not send."""
        leaves, treedef = jax.tree.flatten(params)
        narrow, axes = self._narrow(params), self._cuts(leaves)
        return treedef.unflatten(
            [
                jax.ShapeDtypeStruct(self._part_shape(leaf.shape, axes[i]), leaf.dtype)
                if i in narrow
                else None
                for i, leaf in enumerate(leaves)
            ]
        )

    def _narrow(self, tree: Any) -> list[int]:
        """Returns the numbers of the leaves that the exchange sends."""
        return [
            number
            for number, path in enumerate(parameters.leaf_paths(tree))
            if not any(parameters.matches(pattern, path) for pattern in self.full_precision)
        ]

    def _cuts(self, leaves: list[Any]) -> list[int]:
        """Returns the axis along which each leaf is cut over the inner axis.

        It is -1 for a leaf without an axis that divides, which is cut as a padded flat vector.
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
        """Returns the shape of a leaf as the exchange sees it."""
        if self.inner is None:
            return shape
        count = self.sizes[1]
        if axis < 0:
            return (-(-math.prod(shape) // count),)
        return (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])

    def _cast(self, leaves: list[Any], axes: list[int], dtype: Any) -> list[Any]:
        """Sums leaves over all devices of the batch, sent in a dtype; returns them placed.

        Leaves that are split travel together in a few flat buckets, see `collectives`. Leaves that
        every device holds whole are summed together.
        """
        mesh = self.layout.mesh
        all_axes, state_axis = mesh_lib.batch_axes(mesh), mesh_lib.state_axis(mesh)
        split = [index for index, axis in enumerate(axes) if axis >= 0]
        whole = [index for index, axis in enumerate(axes) if axis < 0]
        parts = collectives.reduce_scatter(
            [leaves[i] for i in split], [axes[i] for i in split], state_axis, dtype
        )
        # The parts are small by then: devices that hold the same part add theirs up, over the outer
        # axes of the batch.
        if outer := all_axes[:-1]:
            parts = collectives.all_reduce(parts, outer, dtype)
        sums = collectives.all_reduce([leaves[i] for i in whole], all_axes, dtype)
        # Back into the order of the leaves.
        placed = dict(zip(split + whole, parts + sums, strict=True))
        return [placed[i] for i in range(len(leaves))]

    def _within(self, leaves: list[Any], cuts: list[int]) -> list[Any]:
        """Sums leaves over the inner axis; returns this device's parts."""
        if self.inner is None:
            return leaves
        count = self.sizes[1]
        # A leaf without an axis that divides is cut as a padded vector.
        whole = [
            leaf if axis >= 0 else jnp.pad(leaf.ravel(), (0, -leaf.size % count))
            for leaf, axis in zip(leaves, cuts, strict=True)
        ]
        return collectives.reduce_scatter(whole, [max(axis, 0) for axis in cuts], self.inner)

    def _exchanged(self, parts: Any, residual: Residual) -> tuple[Any, Residual]:
        """Calls the exchange with one device's residual, from what `init` returns."""
        shapes = jax.eval_shape(self.exchange.init, parts)

        def own(tree: Any, like: Any) -> Any:
            # A number has become a vector of one.
            return jax.tree.map(lambda leaf, one: leaf.reshape(one.shape), tree, like)

        whole = residual.whole
        if self.inner:
            whole = jax.tree.map(lambda leaf: leaf[0], whole)
        sums, found = self.exchange.reduce(
            parts,
            Residual(own(residual.device, shapes.device), own(residual.split, shapes.split), whole),
        )
        whole = found.whole
        if self.inner:
            whole = jax.tree.map(lambda leaf: leaf[None], whole)
        device, split = jax.tree.map(jnp.atleast_1d, (found.device, found.split))
        return sums, Residual(device, split, whole)

    def _place(
        self, sums: list[Any], shapes: list[tuple[int, ...]], cuts: list[int], places: list[int]
    ) -> list[Any]:
        """Places sums as the optimizer's state: whole, or this device's part over the state axis.

        Args:
          sums: of the leaves, or with an inner axis of their parts.
          shapes: of the whole leaves.
          cuts: the axes along which they were cut over the inner axis.
          places: the axes along which the state is split over it; -1 for whole.
        """
        if self.inner is None:
            state = mesh_lib.state_axis(self.layout.mesh)
            return [
                leaf if axis < 0 else collectives.local_part(leaf, axis, state)
                for leaf, axis in zip(sums, places, strict=True)
            ]
        # Parts along the state's own axis are in place.
        missing = [i for i, axis in enumerate(places) if axis < 0]
        gathered = collectives.all_gather(
            [sums[i] for i in missing], [max(cuts[i], 0) for i in missing], self.inner
        )
        found = dict(enumerate(sums))
        for i, leaf in zip(missing, gathered, strict=True):
            size = math.prod(shapes[i])
            found[i] = leaf if cuts[i] >= 0 else leaf[:size].reshape(shapes[i])
        return [found[i] for i in range(len(sums))]


def any_not_finite(grads: Any, axes: tuple[str, ...]) -> jax.Array:
    """Returns whether an element of any device's gradient is NaN or infinite, inside shard_map.

    An exchange that sends a few bits may turn such an element into a finite one.
    """
    own = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads)]
    bad = ~jnp.all(jnp.stack(own)) if own else jnp.bool_(False)
    return lax.psum(bad.astype(jnp.int32), axes) > 0
