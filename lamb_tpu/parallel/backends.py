"""Collectives of a step: placed by the compiler under jit, or explicit inside shard_map.

`config.parallel.backend` chooses one of the two classes. The step in `step.py` is written once
against their common methods. Under jit the step sees whole arrays, and shardings determine the
communication. Inside shard_map, or pmap, it sees one device's part of the batch and calls sums,
scatters and gathers itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from lamb_tpu.optim import clipping
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange import Placed
from lamb_tpu.parallel.exchange.placing import any_not_finite
from lamb_tpu.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class JitBackend:
    """The compiler places the collectives, as the shardings of the layout demand."""

    layout: Layout

    @property
    def num_shards(self) -> int:
        """Number of parts into which the batch that the step sees is split over devices."""
        return mesh_lib.num_batch_shards(self.layout.mesh)

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """Sharding of the batch that the step sees; None where it is one device's rows."""
        return mesh_lib.batch_sharding(self.layout.mesh)

    def positions(self, rows: int, steps: int) -> jax.Array:
        """Positions in the global batch of the rows that the step sees, (rows,).

        Dropout draws by these, so that the masks do not depend on the number of devices. They are
        in the order of `mesh.microbatch_order`.
        """
        return jnp.asarray(mesh_lib.microbatch_order(rows, self.num_shards, steps), jnp.int32)

    def whole_params(self, params: Any) -> Any:
        """Parameters with no axis split over the state axis, as the model needs them."""
        return params

    def add(self, sums: Any) -> Any:
        """Sums over all examples, from those of the rows that the step sees."""
        return sums

    def reduce(self, grads: Any, residual: Any) -> tuple[Any, Any]:
        """Gradients summed over all examples, placed as the optimizer's state.

        Returns them with the residual that the exchange keeps, see `exchange`; under jit the
        compiler sends the gradients, and the residual is as it was.
        """
        # The constraint says where the sums are to be: whole where moments are whole, in parts
        # under ZeRO-1. The compiler may still reduce whole arrays and cut them.
        return lax.with_sharding_constraint(grads, self.layout.moments), residual

    def reset(self, residual: Any) -> Any:
        """The residual without the values of earlier sums, see `exchange.base`."""
        return residual

    def not_finite(self, grads: Any) -> jax.Array | None:
        """True where an element of a gradient is NaN or infinite, before it is reduced.

        None where the sums, and so their norm, are then not finite either.
        """
        return None

    def parts(self, params: Any) -> Any:
        """Parameters placed as the optimizer's state."""
        return lax.with_sharding_constraint(params, self.layout.moments)

    def from_parts(self, params: Any) -> Any:
        """Parameters placed as between updates, from those placed as the optimizer's state."""
        return lax.with_sharding_constraint(params, self.layout.params)

    def norm(self, tree: Any) -> jax.Array:
        """The l2 norm of all leaves of a tree that is placed as the optimizer's state."""
        return clipping.global_norm(tree)


@dataclasses.dataclass(frozen=True)
class ShardMapBackend:
    """The step calls its collectives, inside shard_map over the batch axes of the mesh.

    Attributes:
      layout: where parameters and moments live; they are split over the state axis at most.
      exchange: sums the gradients.
    """

    layout: Layout
    exchange: Placed
    num_shards: int = 1
    batch_sharding: NamedSharding | None = None

    @property
    def _axes(self) -> tuple[str, ...]:
        return mesh_lib.batch_axes(self.layout.mesh)

    @property
    def _state_axis(self) -> str:
        return mesh_lib.state_axis(self.layout.mesh)

    def positions(self, rows: int, steps: int) -> jax.Array:
        # Microbatch j is the j-th run of consecutive examples of the global batch; each device has
        # `within` neighbouring ones of it, by its place on the batch axes.
        within = rows // steps
        microbatch = mesh_lib.num_batch_shards(self.layout.mesh) * within
        starts = jnp.arange(steps, dtype=jnp.int32)[:, None] * microbatch
        here = lax.axis_index(self._axes) * within + jnp.arange(within, dtype=jnp.int32)
        return (starts + here).ravel()

    def whole_params(self, params: Any) -> Any:
        # Leaf by leaf, so that the compiler may gather each where it is first used.
        def gather(leaf: jax.Array, axis: int) -> jax.Array:
            if axis < 0:
                return leaf
            return lax.all_gather(leaf, self._state_axis, axis=axis, tiled=True)

        return jax.tree.map(gather, params, self.layout.split_axes(self.layout.params))

    def add(self, sums: Any) -> Any:
        return collectives.all_reduce(sums, self._axes)

    def reduce(self, grads: Any, residual: Any) -> tuple[Any, Any]:
        return self.exchange.reduce(grads, residual)

    def reset(self, residual: Any) -> Any:
        return self.exchange.exchange.reset(residual)

    def not_finite(self, grads: Any) -> jax.Array | None:
        return any_not_finite(grads, self._axes) if self.exchange.keeps_residual else None

    def parts(self, params: Any) -> Any:
        def part(leaf: jax.Array, axis: int, held: int) -> jax.Array:
            # Whole in the optimizer's state too, or, under FSDP, held as a part already.
            if axis < 0 or held >= 0:
                return leaf
            return collectives.local_part(leaf, axis, self._state_axis)

        split_axes = self.layout.split_axes
        return jax.tree.map(
            part, params, split_axes(self.layout.moments), split_axes(self.layout.params)
        )

    def from_parts(self, params: Any) -> Any:
        leaves, treedef = jax.tree.flatten(params)
        axes = jax.tree.leaves(self.layout.split_axes(self.layout.moments))
        held = jax.tree.leaves(self.layout.split_axes(self.layout.params))
        # Split in the optimizer's state, but whole between updates: ZeRO-1.
        missing = [i for i in range(len(leaves)) if axes[i] >= 0 and held[i] < 0]
        gathered = collectives.all_gather(
            [leaves[i] for i in missing], [axes[i] for i in missing], self._state_axis
        )
        for index, leaf in zip(missing, gathered, strict=True):
            leaves[index] = leaf
        return treedef.unflatten(leaves)

    def norm(self, tree: Any) -> jax.Array:
        # Leaves that are split are summed over the state axis; whole ones must count once.
        return clipping.global_norm(tree, self.layout.axis_name)
