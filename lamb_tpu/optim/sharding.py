"""Sharding of an optimizer's state, derived from the parameters' sharding."""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lamb_tpu.optim import checks


def state_sharding(
    tx: optax.GradientTransformation, params: optax.Params, params_sharding: Any
) -> optax.OptState:
    """Returns a sharding for every leaf of `tx.init(params)`.

    Only paths and shapes are compared, so `tx` may be any transform, even a chain, a mask,
    `optax.partition`, `optax.MultiSteps` or a similar transform. A leaf of the state belongs to a
    parameter if the leaf's path ends in the parameter's path: `mu/dense/kernel` belongs to
    `dense/kernel`. (If several parameters match, the longest path decides.) If leaf and parameter
    have the same shape, the leaf takes the parameter's sharding. If they have the same number of axes but
    different sizes, as for a norm with size 1 or a projected moment, axes of equal size are sharded
    alike. All other leaves, such as counts and diagnostics, are replicated. (Inside `shard_map`,
    diagnostics of a stack that is split by layers need a separate spec.)

    >>> params = {'kernel': jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    >>> state = state_sharding(optax.adam(0.1), params, {'kernel': PartitionSpec('data')})
    >>> print(tuple(state[0].mu['kernel']), tuple(state[0].count))
    ('data',) ()

    Use `jax.jit(tx.init, out_shardings=state_sharding(...))(params)` to create the state with this
    sharding. Without `out_shardings`, `jit` puts arrays that depend on no parameter, such as zeros
    and counts, on one device. The arrays may not fit on this device, and a step over several processes
    rejects them.

    Args:
      tx: a transform; its `init` is only evaluated for shapes.
      params: arrays or `jax.ShapeDtypeStruct`s.
      params_sharding: a `NamedSharding` or `PartitionSpec` for every parameter, or a prefix of this
        tree, such as one sharding for all. Other classes of shardings must be fully replicated.

    Returns:
      A tree like the state. Its leaves are shardings or, if params_sharding has `PartitionSpec`s,
      `PartitionSpec`s for `shard_map`.

    Raises:
      ValueError: params_sharding is empty, is not a prefix of params, or does not fit a parameter.
    """
    checks.check_transform("tx", tx)
    checks.check_arrays("params", params)
    given = jax.tree.leaves(params_sharding)
    if not given:
        raise ValueError(f"params_sharding={params_sharding!r} is empty; use at least one sharding")
    try:
        shardings = jax.tree.leaves(jax.tree.broadcast(params_sharding, params))
    except ValueError as error:
        raise ValueError(
            f"params_sharding={checks.short(params_sharding)} must have the structure of params or "
            f"be a prefix of it: {error}"
        ) from error
    known = {}
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), shardings, strict=True
    ):
        _check(checks.joined(path), np.shape(leaf), sharding)
        known[path] = np.shape(leaf), sharding
    replicated = _with_spec(given[0], PartitionSpec())

    def leaf_sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        owner = owner_of(path, known)
        if owner is None:
            return replicated
        shape, sharding = known[owner]
        if leaf.shape == shape:
            return sharding
        # In Adafactor's factored moments, for example, it is unknown which axes of the parameter
        # remain.
        if leaf.ndim != len(shape):
            return replicated
        # Do not split an axis with another size, such as the size 1 in a norm.
        axes = [
            axis if leaf_size == size else None
            for axis, leaf_size, size in zip(_spec(sharding), leaf.shape, shape, strict=False)
        ]
        while axes and axes[-1] is None:  # the specs that `jit` returns have no None at the end
            axes.pop()
        return _with_spec(sharding, PartitionSpec(*axes))

    # Drop the shardings of params, because they may belong to a mesh other than the current mesh.
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(np.shape(p), jnp.result_type(p)), params)
    return jax.tree_util.tree_map_with_path(leaf_sharding, jax.eval_shape(tx.init, shapes))


def owner_of(path: tuple[Any, ...], known: Container[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Returns the path in `known` of the parameter that owns the state's leaf at `path`, or None."""
    # Try suffixes of the path, the longest first. The last is the empty path, which belongs to a
    # parameter without a container. Compare keys instead of their text: 'a' may be a key of a dict or the
    # name of an attribute.
    suffixes = (path[start:] for start in range(len(path) + 1))
    return next((suffix for suffix in suffixes if suffix in known), None)


def _spec(sharding: Sharding | PartitionSpec) -> PartitionSpec:
    if isinstance(sharding, PartitionSpec):
        return sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _with_spec(sharding: Sharding | PartitionSpec, spec: PartitionSpec) -> Any:
    if isinstance(sharding, PartitionSpec):
        return spec
    # `update` preserves the mesh and the memory kind, such as pinned host memory.
    return sharding.update(spec=spec) if isinstance(sharding, NamedSharding) else sharding


def _check(path: str, shape: tuple[int, ...], sharding: Any) -> None:
    if not isinstance(sharding, (NamedSharding, PartitionSpec)) and not (
        isinstance(sharding, Sharding) and sharding.is_fully_replicated
    ):
        raise ValueError(
            f"params_sharding[{path!r}]={sharding!r} must be a NamedSharding or a PartitionSpec"
        )
    if len(_spec(sharding)) > len(shape):
        raise ValueError(
            f"params_sharding[{path!r}]={_spec(sharding)} has more entries than the parameter has axes; it "
            f"has the shape {shape}"
        )
    if isinstance(sharding, NamedSharding):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise ValueError(f"the parameter {path!r} cannot be split: {error}") from error
