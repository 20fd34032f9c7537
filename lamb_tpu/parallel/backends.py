"""Collectives of a step: placed by the compiler under jit, or explicit inside shard_map.

`config.parallel.backend` chooses one of the two classes. The step in `update.py` is written once,
with the methods that both classes have. Under jit the step sees global arrays, and shardings
determine the communication. Inside shard_map or pmap the step sees one device's shard of the batch
and calls sums, scatters and gathers itself.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from lamb_tpu.optim import clipping
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel.exchange import ShardedExchange
from lamb_tpu.parallel.exchange.sharded import any_not_finite
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class JitBackend:
    """The compiler places the collectives that the shardings of the layout need."""

    layout: Layout

    @property
    def num_shards(self) -> int:
        """Number of shards of the batch that the step sees."""
        return mesh_lib.num_batch_shards(self.layout.mesh)

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """Sharding of the batch that the step sees; None if the batch is one device's rows."""
        return mesh_lib.batch_sharding(self.layout.mesh)

    def positions(self, rows: int, steps: int) -> jax.Array:
        """Returns the global positions of the rows that the step sees, see `rows.positions`."""
        return rows_lib.positions(rows, self.num_shards, steps)

    def whole_params(self, params: Params) -> Any:
        """Returns full parameters for the model, gathered over the state axis inside shard_map."""
        return params

    def add(self, sums: PyTree) -> Any:
        """Returns sums over all examples, from sums over the rows that the step sees."""
        return sums

    def reduce(self, grads: PyTree, residual: PyTree) -> tuple[Any, Any]:
        """Returns gradients summed over all examples, sharded like the optimizer's state.

        Also returns the residual of the exchange, see `exchange`. Under jit the compiler sends the
        gradients, and the residual does not change.
        """
        # The sums get the sharding of the moments, which ZeRO-1 splits. The compiler may still
        # reduce full arrays and slice them.
        return lax.with_sharding_constraint(grads, self.layout.moments), residual

    def reset(self, residual: PyTree) -> Any:
        """Returns the residual without the values of earlier sums, see `Exchange.reset`."""
        return residual

    def not_finite(self, grads: PyTree) -> jax.Array | None:
        """Returns whether any device's gradient has a NaN or infinite element before the reduction.

        Returns None if NaN and infinity survive the reduction, so that the norm of the sums shows them.
        """
        return None

    def parts(self, params: Params) -> Any:
        """Returns parameters sharded like the optimizer's state."""
        return lax.with_sharding_constraint(params, self.layout.moments)

    def from_microbatches(self, params: Params) -> Any:
        """Reshards parameters from the optimizer state's sharding to the sharding between updates."""
        return lax.with_sharding_constraint(params, self.layout.params)

    def norm(self, tree: PyTree) -> jax.Array:
        """Returns the l2 norm of all leaves of a tree that is sharded like the optimizer's state."""
        return clipping.global_norm(tree)


@dataclasses.dataclass(frozen=True)
class ShardMapBackend:
    """The step calls the collectives explicitly, inside shard_map over the batch axes of the mesh."""

    layout: Layout  # splits parameters and moments over no mesh axis other than the state axis
    exchange: ShardedExchange
    num_shards: int = 1
    batch_sharding: NamedSharding | None = None

    @property
    def _axes(self) -> tuple[str, ...]:
        return mesh_lib.batch_axes(self.layout.mesh)

    @property
    def _state_axis(self) -> str:
        return mesh_lib.state_axis(self.layout.mesh)

    def positions(self, rows: int, steps: int) -> jax.Array:
        shards = mesh_lib.num_batch_shards(self.layout.mesh)
        return rows_lib.positions(rows, shards, steps, lax.axis_index(self._axes))

    def whole_params(self, params: Params) -> Any:
        # Gather leaf by leaf, so that the compiler may gather each leaf at its first use.
        def gather(leaf: jax.Array, axis: int) -> jax.Array:
            if axis < 0:
                return leaf
            return lax.all_gather(leaf, self._state_axis, axis=axis, tiled=True)

        return jax.tree.map(gather, params, self.layout.split_axes(self.layout.params))

    def add(self, sums: PyTree) -> Any:
        return collectives.all_reduce(sums, self._axes)

    def reduce(self, grads: PyTree, residual: PyTree) -> tuple[Any, Any]:
        return self.exchange.reduce(grads, residual)

    def reset(self, residual: PyTree) -> Any:
        return self.exchange.exchange.reset(residual)

    def not_finite(self, grads: PyTree) -> jax.Array | None:
        return any_not_finite(grads, self._axes) if self.exchange.keeps_residual else None

    def parts(self, params: Params) -> Any:
        def shard(leaf: jax.Array, axis: int, held: int) -> jax.Array:
            # Keep leaves that are replicated in the optimizer's state, and FSDP's leaves, which are shards.
            if axis < 0 or held >= 0:
                return leaf
            return collectives.local_part(leaf, axis, self._state_axis)

        split_axes = self.layout.split_axes
        return jax.tree.map(
            shard, params, split_axes(self.layout.moments), split_axes(self.layout.params)
        )

    def from_microbatches(self, params: Params) -> Any:
        leaves, treedef = jax.tree.flatten(params)
        axes = jax.tree.leaves(self.layout.split_axes(self.layout.moments))
        held = jax.tree.leaves(self.layout.split_axes(self.layout.params))
        # Under ZeRO-1 these leaves are split in the optimizer's state but replicated between updates.
        missing = [i for i in range(len(leaves)) if axes[i] >= 0 and held[i] < 0]
        gathered = collectives.all_gather(
            [leaves[i] for i in missing], [axes[i] for i in missing], self._state_axis
        )
        return treedef.unflatten(collectives.replaced(leaves, missing, gathered))

    def norm(self, tree: PyTree) -> jax.Array:
        # Split leaves are summed over the state axis; replicated leaves must count once.
        return clipping.global_norm(tree, self.layout.axis_name)
