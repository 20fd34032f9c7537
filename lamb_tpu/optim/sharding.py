"""Sharding of an optimizer's state, derived from that of the parameters."""

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

    Works for any transform, in chains, masks, `optax.partition`, `optax.MultiSteps` and the like,
    because it looks at paths and shapes and never at classes. A leaf of the state belongs to the
    parameter whose path ends its own, the longest where there are several: `mu/dense/kernel` to
    `dense/kernel`. Where the shapes are equal it takes the parameter's sharding. Where only sizes
    differ (a norm kept with size 1, a projected moment) it keeps the sharding of the axes of equal
    size. Everything else, as counts and readings, is replicated
    (inside `shard_map`, readings of a stack that is split by layers need a spec of their own).

    >>> params = {'kernel': jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    >>> state = state_sharding(optax.adam(0.1), params, {'kernel': PartitionSpec('data')})
    >>> print(tuple(state[0].mu['kernel']), tuple(state[0].count))
    ('data',) ()

    `jax.jit(tx.init, out_shardings=state_sharding(...))(params)` makes the state where it will
    stay. `jit` alone leaves zeros and counts, which depend on no parameter, whole on one device:
    too large for it where state is split, and refused by a step over several processes.

    Args:
      tx: anything with an `init`, of which only shapes are computed.
      params: arrays or `jax.ShapeDtypeStruct`s.
      params_sharding: a `NamedSharding` or `PartitionSpec` for every parameter, or a prefix of
        that tree, such as one for all. Other shardings are taken where they do not split.

    Returns:
      A tree like the state: shardings, or `PartitionSpec`s, as `shard_map` has them, where
      params_sharding holds those.

    Raises:
      ValueError: params_sharding is empty, is no prefix of params, or holds something that does
        not fit the parameter, which is named.
    """
    checks.check_transform("tx", tx)
    checks.check_arrays("params", params)
    given = jax.tree.leaves(params_sharding)
    if not given:
        raise ValueError(
            f"params_sharding is empty: give one sharding for all, not {params_sharding!r}"
        )
    try:
        # A prefix of the tree, such as one sharding for all, is given to all leaves below it.
        shardings = jax.tree.leaves(jax.tree.broadcast(params_sharding, params))
    except ValueError as error:
        raise ValueError(
            f"params_sharding has another structure than params, and is no prefix of it, being "
            f"{checks.short(params_sharding)}: {error}"
        ) from error
    known = {}
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), shardings, strict=True
    ):
        _check(jax.tree_util.keystr(path, simple=True, separator="/"), np.shape(leaf), sharding)
        known[path] = np.shape(leaf), sharding
    replicated = _with_spec(given[0], PartitionSpec())

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        owner = owner_of(path, known)
        if owner is None:
            return replicated
        shape, sharding = known[owner]
        if leaf.shape == shape:
            return sharding
        # Adafactor's factored moments, for example: which of the axes they kept is not known.
        if leaf.ndim != len(shape):
            return replicated
        # A norm with size 1, or a projected moment: axes of another size are whole.
        axes = [
            axis if own == size else None
            for axis, own, size in zip(_spec(sharding), leaf.shape, shape, strict=False)
        ]
        while axes and axes[-1] is None:  # as `jit` gives back what it places; others are not equal
            axes.pop()
        return _with_spec(sharding, PartitionSpec(*axes))

    # Bare shapes: shardings that params carry may belong to a mesh that is not set here.
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(np.shape(p), jnp.result_type(p)), params)
    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(tx.init, shapes))


def owner_of(path: tuple[Any, ...], known: Container[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Returns the path of the parameter to which a leaf of the state belongs; None if to none.

    Args:
      path: of the leaf of the state, as `jax.tree_util.tree_leaves_with_path` gives it.
      known: the paths of the parameters.
    """
    # Suffixes from the longest on, down to the empty path of a bare parameter. Keys are compared,
    # not text: 'a' as a dict's key and as an attribute differ.
    for start in range(len(path) + 1):
        if path[start:] in known:
            return path[start:]
    return None


def _spec(sharding: Sharding | PartitionSpec) -> PartitionSpec:
    if isinstance(sharding, PartitionSpec):
        return sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _with_spec(sharding: Sharding | PartitionSpec, spec: PartitionSpec) -> Any:
    if isinstance(sharding, PartitionSpec):
        return spec
    # `update` keeps the mesh and the kind of memory, such as pinned host memory.
    return sharding.update(spec=spec) if isinstance(sharding, NamedSharding) else sharding


def _check(path: str, shape: tuple[int, ...], sharding: Any) -> None:
    if not isinstance(sharding, (NamedSharding, PartitionSpec)) and not (
        isinstance(sharding, Sharding) and sharding.is_fully_replicated
    ):
        raise ValueError(
            f"params_sharding: the sharding of the parameter {path!r} must be a NamedSharding or a "
            f"PartitionSpec, not {sharding!r}"
        )
    if len(_spec(sharding)) > len(shape):
        raise ValueError(
            f"the parameter {path!r} has the shape {shape}, fewer axes than its {_spec(sharding)}"
        )
    # `shard_shape` raises for a size that the mesh axes do not divide.
    if isinstance(sharding, NamedSharding):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise ValueError(f"the parameter {path!r} cannot be split: {error}") from error
