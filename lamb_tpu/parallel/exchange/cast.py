"""Gradients sent in one dtype, without a residual."""

import dataclasses
from typing import Any

import jax

from lamb_tpu.parallel import collectives
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class Cast:
    """Casts gradients before they are sent and added.

    Leaves that are split travel together in a few flat buckets, see `collectives`. Leaves that
    every device holds whole are summed together.

    Attributes:
      layout: the shardings of parameters and moments.
      dtype: the dtype in which gradients are sent and added; None: their own.
    """

    layout: Layout
    dtype: Any = None

    def init(self, params: Any) -> tuple[()]:
        return ()

    def reduce(self, grads: Any, residual: tuple[()]) -> tuple[Any, tuple[()]]:
        mesh = self.layout.mesh
        all_axes, state_axis = mesh_lib.batch_axes(mesh), mesh_lib.state_axis(mesh)
        leaves, treedef = jax.tree.flatten(grads)
        axes = jax.tree.leaves(self.layout.split_axes(self.layout.moments))
        split = [index for index, axis in enumerate(axes) if axis >= 0]
        whole = [index for index, axis in enumerate(axes) if axis < 0]
        parts = collectives.reduce_scatter(
            [leaves[i] for i in split], [axes[i] for i in split], state_axis, self.dtype
        )
        # The parts are small by then: devices that hold the same part add theirs up, over the outer
        # axes of the batch.
        if outer := all_axes[:-1]:
            parts = collectives.all_reduce(parts, outer, self.dtype)
        sums = collectives.all_reduce([leaves[i] for i in whole], all_axes, self.dtype)
        # Back into the order of the leaves.
        placed = dict(zip(split + whole, parts + sums, strict=True))
        return treedef.unflatten([placed[i] for i in range(len(leaves))]), residual
