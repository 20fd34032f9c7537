"""Partition rules: which mesh axes split which parameters, by path; and shardings for ZeRO-1."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError
from lamb_tpu.optim import parameters
from lamb_tpu.optim.parameters import ParameterFacts
from lamb_tpu.parallel import mesh as mesh_lib

KINDS = ("replicated", "fsdp")
# A regex over '/'-joined paths, and how the parameters that it finds are split.
Rule = tuple[str, str | Sequence[str | None]]


def partition_params(
    params: Any, rules: Sequence[Rule], mesh: Mesh, facts: Any, activation_axes: Sequence[str] = ()
) -> Any:
    """Returns a `NamedSharding` for every parameter.

    The first rule whose regex is found in a parameter's path decides. A parameter that no rule
    matches is replicated. A rule says one of

    - 'replicated': the parameter is not split;
    - 'fsdp': it is split over the state axis, along its first axis that divides and does not stack
      layers;
    - a list with a mesh axis or None for each axis of the parameter. A mesh axis that is not in the
      mesh has size 1.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      rules: pairs (regex, how to split), in order of precedence.
      mesh: the mesh over all devices.
      facts: the parameters' `ParameterFacts`.
      activation_axes: mesh axes over which the model splits activations by itself.

    Raises:
      UserError: a rule is malformed, matches no parameter, or does not divide a parameter that it
        decides; or a mesh axis splits nothing.
    """
    used: set[int] = set()
    decided: set[int] = set()
    checked = [check_rule(number, rule) for number, rule in enumerate(rules)]

    def place(name: str, leaf: Any, fact: ParameterFacts) -> NamedSharding:
        # All matches, so that an idle rule can be told apart: it matches nothing, or only what
        # earlier rules have decided.
        found = [i for i, (pattern, _) in enumerate(checked) if parameters.matches(pattern, name)]
        decided.update(found)
        if not found:
            return mesh_lib.replicated(mesh)
        used.add(found[0])
        split, where = rules[found[0]][1], f"config.parallel.rules[{found[0]}]"
        if split == "fsdp":
            axis = divisible_axis(leaf.shape, mesh, fact)
            # A scalar, also one for each stacked layer, is too small to matter and stays whole.
            if axis is None and leaf.ndim > len(fact.layer_axes):
                parts = mesh.shape[mesh_lib.state_axis(mesh)]
                raise UserError(
                    f"{where} splits {name!r} of shape {leaf.shape}, of which no axis divides "
                    f"over {parts} devices; let an earlier rule make it 'replicated'"
                )
            spec = split_spec(PartitionSpec(), axis, mesh)
        else:
            spec = _spec([] if split == "replicated" else split, leaf.shape, mesh, where, name)
        return NamedSharding(mesh, spec)

    names = jax.tree.unflatten(jax.tree.structure(params), parameters.leaf_paths(params))
    shardings = jax.tree.map(place, names, params, facts)
    for number, (pattern, _) in enumerate(checked):
        if number not in used:
            why = "only parameters that earlier rules decide" if number in decided else "nothing"
            raise UserError(
                f"config.parallel.rules[{number}] with the regex {pattern.pattern!r} matches {why}"
            )
    _check_mesh_is_used(shardings, mesh, activation_axes)
    return shardings


def check_rule(number: int, rule: Any) -> tuple[re.Pattern, Any]:
    """Returns a rule with its regex compiled.

    Raises:
      UserError: the rule is malformed.
    """
    where = f"config.parallel.rules[{number}]"
    if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) != 2:
        raise UserError(f"{where} is {rule!r}; it must be a pair (regex, how to split)")
    pattern, split = rule
    try:
        pattern = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UserError(
            f"{where} is not a valid regular expression: {rule[0]!r} ({error})"
        ) from None
    if isinstance(split, str) and split in KINDS:
        return pattern, split
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise UserError(
            f"{where} splits by {split!r}; it must be one of {', '.join(KINDS)} or a list with a "
            "mesh axis or None for each axis of the parameter"
        )
    for axis in split:
        if axis is not None and axis not in mesh_lib.AXES:
            raise UserError(
                f"{where} names the mesh axis {axis!r}; known: {', '.join(mesh_lib.AXES)}"
            )
    named = [axis for axis in split if axis is not None]
    if len(set(named)) < len(named):
        raise UserError(f"{where} names a mesh axis twice: {list(split)}")
    return pattern, split


def _spec(
    split: Sequence[str | None], shape: tuple[int, ...], mesh: Mesh, where: str, name: str
) -> PartitionSpec:
    if len(split) > len(shape):
        raise UserError(
            f"{where} has {len(split)} axes and {name!r} has the shape {shape}; give one for each "
            "axis of the parameter"
        )
    # One list of rules serves meshes with and without an axis.
    axes = [axis if axis in mesh.shape else None for axis in split]
    for axis, size in zip(axes, shape, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"{where} splits {name!r} of shape {shape} over the mesh axis {axis!r} of size "
                f"{mesh.shape[axis]}, which does not divide {size}"
            )
    return _trimmed(axes)


def _trimmed(axes: list[Any]) -> PartitionSpec:
    # As `jit` gives back what it places; specs that end in None are not equal to those.
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def sequence_axes(mesh: Mesh, num_heads: int, length: int) -> tuple[str, ...]:
    """The mesh axes over which a model splits sequences, see `transformer.split_sequence`.

    Args:
      mesh: the mesh over all devices.
      num_heads: number of attention heads.
      length: length of the sequences, in tokens.

    Raises:
      UserError: the sequences, or the heads, do not divide over these axes.
    """
    sequence, model = mesh.shape.get("sequence", 1), mesh.shape.get("model", 1)
    if sequence == 1:
        return ()
    if length % sequence:
        raise UserError(
            f"config.mesh.sequence is {sequence}, which does not divide sequences of {length} "
            "tokens"
        )
    # In attention a device has whole sequences of some heads, split over both axes.
    if num_heads % (sequence * model):
        raise UserError(
            f"config.mesh.sequence={sequence} and config.mesh.model={model} split attention into "
            f"{sequence * model} parts, which do not divide config.model.num_heads={num_heads}"
        )
    return ("sequence",)


def _check_mesh_is_used(shardings: Any, mesh: Mesh, activation_axes: Sequence[str]) -> None:
    named = {
        axis
        for sharding in jax.tree.leaves(shardings)
        for entry in sharding.spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    # Devices along an axis that splits nothing would all compute the same.
    used = {*mesh_lib.BATCH_AXES, *activation_axes, *named}
    for axis in (axis for axis in mesh.shape if axis not in used):
        raise UserError(
            f"config.mesh.{axis} is {mesh.shape[axis]}, but nothing is split over that axis; make "
            "it 1, or give config.parallel.rules that name it"
        )


def divisible_axis(
    shape: tuple[int, ...],
    mesh: Mesh,
    facts: ParameterFacts,
    taken: Sequence[Any] | PartitionSpec = (),
) -> int | None:
    """Returns the first axis of a parameter that divides over the state axis, or None.

    Args:
      shape: shape of the parameter.
      mesh: the mesh over all devices.
      facts: facts of the parameter. Axes that stack layers stay whole, so that each layer's norm is
        taken over all devices.
      taken: mesh axes that already split the parameter, one entry for each of its axes.
    """
    parts = mesh.shape[mesh_lib.state_axis(mesh)]
    for axis, size in enumerate(shape):
        free = axis >= len(taken) or taken[axis] is None
        # An axis of length 0 divides by anything, but there is nothing to split.
        if free and axis not in facts.layer_axes and size % parts == 0 and size:
            return axis
    return None


def split_spec(spec: PartitionSpec, axis: int | None, mesh: Mesh) -> PartitionSpec:
    """Returns `spec` with `axis` split over the state axis too; None returns it unchanged."""
    if axis is None:
        return spec
    # A spec may be shorter than the parameter has axes.
    axes = list(spec) + [None] * (axis + 1 - len(spec))
    axes[axis] = mesh_lib.state_axis(mesh)
    return _trimmed(axes)


def check_named(shardings: Any, mesh: Mesh, facts: Any) -> None:
    """Refuses shardings of parameters that the step inside shard_map cannot gather.

    Raises:
      UserError: a parameter is split over another axis than the state axis, or along an axis that
        stacks layers, whose norms the program could not tell apart.
    """
    state = mesh_lib.state_axis(mesh)
    for path, sharding, fact in zip(
        parameters.leaf_paths(shardings),
        jax.tree.leaves(shardings),
        jax.tree.leaves(facts),
        strict=True,
    ):
        for axis, entry in enumerate(sharding.spec):
            if entry not in (None, state):
                raise UserError(
                    f"config.parallel.rules splits {path!r} over {entry!r}; under "
                    f"config.parallel.backend='shard_map' it can be split over {state!r} alone"
                )
            if entry and axis in fact.layer_axes:
                raise UserError(
                    f"config.parallel.rules splits {path!r} along axis {axis}, which stacks "
                    "layers; that needs config.parallel.backend='jit'"
                )


def zero1(params: Any, params_sharding: Any, mesh: Mesh, facts: Any) -> Any:
    """Shardings of the optimizer's state under ZeRO-1, one for each parameter.

    The state is split over the state axis, along the parameter's first axis that divides and is not
    split already. State of a parameter without such an axis, such as a bias of odd length, is
    placed as the parameter.
    """

    def place(leaf: Any, sharding: NamedSharding, fact: ParameterFacts) -> NamedSharding:
        state = mesh_lib.state_axis(mesh)
        # Under FSDP the parameter itself is split over the state axis, and so are its moments.
        if state in sharding.spec:
            return sharding
        axis = divisible_axis(leaf.shape, mesh, fact, sharding.spec)
        return sharding.update(spec=split_spec(sharding.spec, axis, mesh))

    return jax.tree.map(place, params, params_sharding, facts)


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes of a tree of arrays or `jax.ShapeDtypeStruct`s on one device."""
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )


def describe(
    params: Any, shardings: Any, rules: Sequence[Rule], state: Mapping[str, tuple[Any, Any]]
) -> str:
    """Lines for the terminal: what each rule splits, and the bytes on a device.

    Args:
      params: the parameters.
      shardings: the parameters' shardings.
      rules: the rules that the shardings follow.
      state: further trees on a device, name -> (tree, shardings).
    """
    groups: dict[str, list[tuple[Any, Any]]] = {}
    for path, leaf, sharding in zip(
        parameters.leaf_paths(params),
        jax.tree.leaves(params),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        decides = next((rule for rule in rules if parameters.matches(rule[0], path)), None)
        by = f"by the rule {decides[0]!r}" if decides else "by no rule"
        split = ", ".join(str(entry) if entry else "-" for entry in sharding.spec)
        how = f"split ({split})" if split else "replicated"
        groups.setdefault(f"{how} {by}" if rules else how, []).append((leaf, sharding))
    lines = [
        _line(f"{len(members)} parameter(s) {name}", *zip(*members))
        for name, members in groups.items()
    ]
    for name, (tree, places) in state.items():
        if jax.tree.leaves(tree):
            lines.append(_line(name, tree, places))
    return "\n".join(lines)


def _line(name: str, tree: Any, shardings: Any) -> str:
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return f"{name}: {_size(total)}, {_size(bytes_per_device(tree, shardings))} a device"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
