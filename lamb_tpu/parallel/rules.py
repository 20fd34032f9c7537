"""Partition rules, which map parameter paths to mesh axes, and shardings for ZeRO-1."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError, listed, not_divisible
from lamb_tpu.optim import parameters
from lamb_tpu.optim.parameters import ParameterMetadata
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.types import Params, PyTree

TYPES = ("replicated", "fsdp")
# A pair: a regex over '/'-joined paths, and how matching parameters are split.
Rule = tuple[str, str | Sequence[str | None]]


def partition_params(
    params: Params,
    rules: Sequence[Rule],
    mesh: Mesh,
    metadata: Any,
    activation_axes: Sequence[str] = (),
) -> Any:
    """Returns a `NamedSharding` for every parameter.

    The first rule with a regex that matches a parameter's path decides. A parameter that no rule
    matches is replicated. The second entry of a rule is one of these values:

    - 'replicated': the parameter is not split.
    - 'fsdp': the parameter is split over the state axis, along its first axis of divisible length
      that does not stack layers.
    - a list with a mesh axis or None for each axis of the parameter. A mesh axis that the mesh lacks
      counts as one of size 1.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      rules: pairs (regex, how to split), in order of precedence.
      mesh: the mesh over all devices.
      metadata: the parameters' `ParameterMetadata`.
      activation_axes: mesh axes over which the model itself splits activations.

    Raises:
      UserError: a rule is malformed, matches no parameter, or cannot split a parameter evenly; or a
        mesh axis splits nothing.
    """
    used: set[int] = set()
    decided: set[int] = set()
    checked = [check_rule(number, rule) for number, rule in enumerate(rules)]

    def sharding_of(name: str, leaf: Any, meta: ParameterMetadata) -> NamedSharding:
        # Collect all matches, not only the first: the error for an unused rule says whether it
        # matches nothing, or only parameters that earlier rules decide.
        matching = [
            i for i, (pattern, _) in enumerate(checked) if parameters.matches(pattern, name)
        ]
        decided.update(matching)
        if not matching:
            return mesh_lib.replicated(mesh)
        used.add(matching[0])
        split, where = rules[matching[0]][1], f"config.parallel.rules[{matching[0]}]"
        if split == "fsdp":
            axis = divisible_axis(leaf.shape, mesh, meta)
            # A parameter with one number, or one number per stacked layer, is too small to matter
            # and stays replicated.
            if axis is None and leaf.ndim > len(meta.layer_axes):
                parts = mesh.shape[mesh_lib.state_axis(mesh)]
                raise UserError(
                    where,
                    split,
                    f"cannot split {name!r} of shape {leaf.shape}, because none of its axes (other than "
                    f"axes that stack layers) is divisible by the {parts} devices of the mesh axis "
                    f"{mesh_lib.state_axis(mesh)!r}",
                    "add an earlier rule that makes this parameter 'replicated'",
                )
            spec = split_spec(PartitionSpec(), axis, mesh)
        else:
            spec = _spec([] if split == "replicated" else split, leaf.shape, mesh, where, name)
        return NamedSharding(mesh, spec)

    names = jax.tree.unflatten(jax.tree.structure(params), parameters.leaf_paths(params))
    shardings = jax.tree.map(sharding_of, names, params, metadata)
    for number, (pattern, _) in enumerate(checked):
        if number not in used:
            why = "only parameters that earlier rules decide" if number in decided else "nothing"
            raise UserError(
                f"config.parallel.rules[{number}]",
                pattern.pattern,
                f"matches {why}",
                "correct the regular expression, or remove the rule",
            )
    _check_mesh_is_used(shardings, mesh, activation_axes)
    return shardings


def check_rule(number: int, rule: Any) -> tuple[re.Pattern, Any]:
    """Returns rule `number` with its regex compiled. Raises UserError if the rule is malformed."""
    where = f"config.parallel.rules[{number}]"
    if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) != 2:
        remedy = "use a pair (regular expression, how to split), such as ('kernel', 'fsdp')"
        raise UserError(where, rule, "is not a pair", remedy)
    pattern, split = rule
    try:
        pattern = re.compile(pattern)
    except (re.error, TypeError) as error:
        problem = f"is not a valid regular expression ({error})"
        raise UserError(where, rule[0], problem, "correct it") from None
    if isinstance(split, str) and split in TYPES:
        return pattern, split
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise UserError(
            where,
            split,
            "is not a way to split a parameter",
            f"use {', '.join(TYPES)}, or a list with a mesh axis or None for each axis of the parameter",
        )
    for axis in split:
        if axis is not None and axis not in mesh_lib.AXES:
            problem = f"has the unknown mesh axis {axis!r}"
            raise UserError(where, list(split), problem, f"use {listed(mesh_lib.AXES)}")
    named = [axis for axis in split if axis is not None]
    if len(set(named)) < len(named):
        raise UserError(
            where, list(split), "names a mesh axis twice", "name each axis at most once"
        )
    return pattern, split


def _spec(
    split: Sequence[str | None], shape: tuple[int, ...], mesh: Mesh, where: str, name: str
) -> PartitionSpec:
    if len(split) > len(shape):
        problem = f"has {len(split)} entries, but {name!r} has the shape {shape}"
        raise UserError(
            where, list(split), problem, "give at most one entry for each axis of the parameter"
        )
    # Ignore axes that the mesh lacks, so that the same rules can be used on any mesh.
    axes = [axis if axis in mesh.shape else None for axis in split]
    for axis, size in zip(axes, shape, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                where,
                list(split),
                f"splits {name!r} of shape {shape} over the mesh axis {axis!r} of size "
                f"{mesh.shape[axis]}, which does not divide {size}",
                f"split another axis, or change config.mesh.{axis}",
            )
    return _trimmed(axes)


def _trimmed(axes: list[Any]) -> PartitionSpec:
    # `jit` returns specs without trailing None, and a spec with trailing None is not equal to these.
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def sequence_axes(mesh: Mesh, num_heads: int, length: int) -> tuple[str, ...]:
    """Returns the mesh axes over which a model splits sequences, see `transformer.split_sequence`.

    Raises UserError if the size of the axis 'sequence' does not divide `length`, in tokens, or if
    this size times that of the axis 'model' does not divide the number of attention heads.
    """
    sequence, model = mesh.shape.get("sequence", 1), mesh.shape.get("model", 1)
    if sequence == 1:
        return ()
    if length % sequence:
        problem = f"does not divide the sequence length, {length} tokens"
        raise UserError("config.mesh.sequence", sequence, problem, f"use a divisor of {length}")
    # In attention a device has full sequences for some of the heads. Both axes split the heads.
    if num_heads % (sequence * model):
        split = f"config.mesh.sequence={sequence} times config.mesh.model={model}"
        raise not_divisible("config.model.num_heads", num_heads, sequence * model, split)
    return ("sequence",)


def _check_mesh_is_used(shardings: PyTree, mesh: Mesh, activation_axes: Sequence[str]) -> None:
    named = {
        axis
        for sharding in jax.tree.leaves(shardings)
        for entry in sharding.spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    # All devices along an axis that splits nothing would do the same computation.
    used = {*mesh_lib.BATCH_AXES, *activation_axes, *named}
    for axis in (axis for axis in mesh.shape if axis not in used):
        remedy = "use 1, or add a rule to config.parallel.rules that names the axis"
        raise UserError(f"config.mesh.{axis}", mesh.shape[axis], "splits nothing", remedy)


def divisible_axis(
    shape: tuple[int, ...],
    mesh: Mesh,
    metadata: ParameterMetadata,
    taken: Sequence[Any] | PartitionSpec = (),
) -> int | None:
    """Returns the first axis of a parameter that the state axis can split, or None.

    Axes that stack layers are not split: then every device has a shard of each layer, and a layer's
    norm is a sum over devices. `taken` has for each axis of the parameter the mesh axis that already
    splits it, or None.
    """
    parts = mesh.shape[mesh_lib.state_axis(mesh)]
    for axis, size in enumerate(shape):
        free = axis >= len(taken) or taken[axis] is None
        # Length 0 is divisible by any number, but there is nothing to split.
        if free and axis not in metadata.layer_axes and size % parts == 0 and size:
            return axis
    return None


def split_spec(spec: PartitionSpec, axis: int | None, mesh: Mesh) -> PartitionSpec:
    """Returns `spec` with `axis` also split over the state axis; unchanged if `axis` is None."""
    if axis is None:
        return spec
    # A spec may be shorter than the parameter has axes.
    axes = list(spec) + [None] * (axis + 1 - len(spec))
    axes[axis] = mesh_lib.state_axis(mesh)
    return _trimmed(axes)


def check_named(shardings: PyTree, mesh: Mesh, metadata: Any) -> None:
    """Rejects shardings of parameters that the step inside shard_map cannot gather.

    Raises:
      UserError: a parameter is split over a mesh axis other than the state axis, or along an axis
        that stacks layers, so the program could not compute each layer's norm separately.
    """
    state = mesh_lib.state_axis(mesh)
    paths, layers = parameters.leaf_paths(shardings), jax.tree.leaves(metadata)
    for path, sharding, meta in zip(paths, jax.tree.leaves(shardings), layers, strict=True):
        for axis, entry in enumerate(sharding.spec):
            if entry not in (None, state):
                how, remedy = f"over {entry!r}", f"split this parameter over {state!r} alone"
            elif entry and axis in meta.layer_axes:
                how = f"along axis {axis}, which stacks layers"
                remedy = "split another axis of this parameter"
            else:
                continue
            problem = f"cannot gather {path!r}, which config.parallel.rules split {how}"
            key = "config.parallel.backend"
            raise UserError(key, "shard_map", problem, f"{remedy}, or use 'jit'")


def zero1(params: Params, params_sharding: Any, mesh: Mesh, metadata: Any) -> Any:
    """Returns the sharding of each parameter's optimizer state under ZeRO-1.

    The state axis splits the first axis of the parameter that has a divisible length and is not
    split already. If a parameter has no such axis, for example a bias of odd length, its optimizer
    state is sharded like the parameter.
    """

    def sharding_of(leaf: Any, sharding: NamedSharding, meta: ParameterMetadata) -> NamedSharding:
        # Under FSDP the state axis already splits the parameter, and therefore its moments.
        if mesh_lib.state_axis(mesh) in sharding.spec:
            return sharding
        axis = divisible_axis(leaf.shape, mesh, meta, sharding.spec)
        return sharding.update(spec=split_spec(sharding.spec, axis, mesh))

    return jax.tree.map(sharding_of, params, params_sharding, metadata)


def bytes_per_device(tree: PyTree, shardings: PyTree) -> int:
    """Returns the bytes that a tree of arrays or `jax.ShapeDtypeStruct`s takes on one device."""
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )


def describe(
    params: Params, shardings: PyTree, rules: Sequence[Rule], state: Mapping[str, tuple[Any, Any]]
) -> str:
    """Returns lines that say which parameters each rule splits, with bytes in total and per device.

    `state` has further trees, name -> (tree, shardings).
    """
    groups: dict[str, list[tuple[Any, Any]]] = {}
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    for path, (leaf, sharding) in zip(parameters.leaf_paths(params), leaves, strict=True):
        rule = next((rule for rule in rules if parameters.matches(rule[0], path)), None)
        by = f"by the rule {rule[0]!r}" if rule else "by default"
        split = ", ".join(str(entry) if entry else "-" for entry in sharding.spec)
        how = f"split ({split})" if split else "replicated"
        groups.setdefault(f"{how} {by}" if rules else how, []).append((leaf, sharding))
    lines = [
        _line(f"{len(members)} parameter(s) {name}", *zip(*members))
        for name, members in groups.items()
    ]
    for name, (tree, tree_shardings) in state.items():
        if jax.tree.leaves(tree):
            lines.append(_line(name, tree, tree_shardings))
    return "\n".join(lines)


def _line(name: str, tree: PyTree, shardings: PyTree) -> str:
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return f"{name}: {_size(total)}, {_size(bytes_per_device(tree, shardings))} a device"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
