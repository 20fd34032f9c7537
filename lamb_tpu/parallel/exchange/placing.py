"""Any exchange in the step: its sums are placed as the optimizer's state."""

import dataclasses
from typing import Any

import jax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.cast import Cast
from lamb_tpu.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class Placed:
    """An exchange whose sums are placed as the optimizer's state.

    Attributes:
      layout: the shardings of parameters and moments.
      exchange: sums whole gradients.
    """

    layout: Layout
    exchange: Exchange

    def init(self, params: Any) -> Residual:
        """Returns one device's residual before the first update, see `Exchange.init`."""
        return self.exchange.init(params)

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        """Returns the sums over devices, placed as the optimizer's state, and the new residual."""
        if isinstance(self.exchange, Cast):
            return cast_and_placed(self.layout, grads, self.exchange.dtype), residual
        sums, residual = self.exchange.reduce(grads, residual)
        state = mesh_lib.state_axis(self.layout.mesh)
        return jax.tree.map(
            lambda leaf, axis: leaf if axis < 0 else collectives.local_part(leaf, axis, state),
            sums, self.layout.split_axes(self.layout.moments),
        ), residual


def cast_and_placed(layout: Layout, grads: Any, dtype: Any = None) -> Any:
    """Sums gradients over the devices of the batch, cast to a dtype; returns them placed.

    Leaves that are split travel together in a few flat buckets, see `collectives`. Leaves that
    every device holds whole are summed together.
    """
    all_axes, state_axis = mesh_lib.batch_axes(layout.mesh), mesh_lib.state_axis(layout.mesh)
    leaves, treedef = jax.tree.flatten(grads)
    axes = jax.tree.leaves(layout.split_axes(layout.moments))
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
    return treedef.unflatten([placed[i] for i in range(len(leaves))])
