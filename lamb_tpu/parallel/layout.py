"""Shardings of the parameters and of the state that belongs to each parameter."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of the parameters and of the state that belongs to each parameter.

    Attributes:
      mesh: the mesh over all devices.
      params: a `NamedSharding` for every parameter.
      moments: a `NamedSharding` for every parameter's moments and moving average; under ZeRO-1
        they are split further than the parameter itself.
    """

    mesh: Mesh
    params: Any
    moments: Any
    _specs: dict[str, PartitionSpec | None] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def axis_name(self, path: str) -> str | None:
        """Returns the mesh axis that splits the update of the parameter at a '/'-joined path."""
        return None if self._specs[path] is None else mesh_lib.state_axis(self.mesh)

    def update_spec(self, path: str) -> PartitionSpec | None:
        """Returns the spec of a parameter's update over the state axis; None if it is whole."""
        return self._specs[path]

    def split_axes(self, shardings: Any) -> Any:
        """Returns the axis along which each leaf is split over the state axis; -1 if it is whole.

        Args:
          shardings: `params` or `moments`.
        """
        state = mesh_lib.state_axis(self.mesh)
        return jax.tree.map(
            lambda sharding: next(
                (i for i, entry in enumerate(sharding.spec) if entry == state), -1
            ),
            shardings,
        )

    def __post_init__(self) -> None:
        # Looked up by path whenever the optimizer is traced. Mesh axes other than the state axis
        # are left out: inside shard_map they split no parameter.
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
    params: Any,
    mesh: Mesh,
    facts: Any,
    rules: Sequence[rules_lib.Rule] = (),
    optimizer_state: str = "replicated",
    activation_axes: Sequence[str] = (),
) -> Layout:
    """Returns the layout by the partition rules and the choice for the optimizer's state.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh over all devices.
      facts: the parameters' `ParameterFacts`.
      rules: see `rules.partition_params`.
      optimizer_state: 'replicated' (moments are placed as their parameters) or 'zero1'.
      activation_axes: see `rules.partition_params`.

    Raises:
      UserError: a rule does not fit the parameters or the mesh.
    """
    shardings = rules_lib.partition_params(params, rules, mesh, facts, activation_axes)
    moments = shardings
    if optimizer_state == "zero1":
        moments = rules_lib.zero1(params, shardings, mesh, facts)
    return Layout(mesh, shardings, moments)
