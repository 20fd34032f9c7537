"""Shardings of the parameters and of the optimizer state of each parameter."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of the parameters and of the optimizer state of each parameter."""

    mesh: Mesh
    params: Params  # a tree with a `NamedSharding` for every parameter
    # A `NamedSharding` for every parameter's optimizer state and average; ZeRO-1 splits these further.
    moments: PyTree
    _specs: dict[str, PartitionSpec | None] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def axis_name(self, path: str) -> str | None:
        """Returns the mesh axis that splits the update of the parameter at a '/'-joined path, or None."""
        return None if self._specs[path] is None else mesh_lib.state_axis(self.mesh)

    def update_spec(self, path: str) -> PartitionSpec | None:
        """Returns the spec of a parameter's update over the state axis; None if it is replicated."""
        return self._specs[path]

    def split_axes(self, shardings: PyTree) -> Any:
        """Returns for each leaf of `params` or `moments` the axis that the state axis splits, or -1."""
        state = mesh_lib.state_axis(self.mesh)
        return jax.tree.map(
            lambda each: each.spec.index(state) if state in each.spec else -1, shardings
        )

    def __post_init__(self) -> None:
        # The optimizer looks specs up by path while it is traced. Specs omit mesh axes other than
        # the state axis, because those axes split no parameter inside shard_map.
        state = mesh_lib.state_axis(self.mesh)
        specs = {
            path: PartitionSpec(*(entry if entry == state else None for entry in sharding.spec))
            if state in sharding.spec
            else None
            for path, sharding in zip(
                parameters.leaf_paths(self.moments), jax.tree.leaves(self.moments), strict=True
            )
        }
        object.__setattr__(self, "_specs", specs)


def make_layout(
    params: Params,
    mesh: Mesh,
    metadata: Any,
    rules: Sequence[rules_lib.Rule] = (),
    optimizer_state: str = "replicated",
    activation_axes: Sequence[str] = (),
) -> Layout:
    """Returns the layout for partition rules and a sharding of the optimizer state.

    With `optimizer_state='replicated'` moments are sharded like their parameters; with 'zero1' they
    are also split over the state axis. For the other arguments and the errors see
    `rules.partition_params`.
    """
    shardings = rules_lib.partition_params(params, rules, mesh, metadata, activation_axes)
    moments = shardings
    if optimizer_state == "zero1":
        moments = rules_lib.zero1(params, shardings, mesh, metadata)
    return Layout(mesh, shardings, moments)
