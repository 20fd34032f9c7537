"""Clipping by the norm of all gradients together, also where each program sees its own shard."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.parameters import ParameterFacts
from lamb_tpu.optim.trust_ratio import AxisName


def clip_global_norm(
    max_norm: float, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Scales all gradients by min(1, max_norm / G), G the l2 norm of all of them together.

    The norm and the product are computed in float32 at least; gradients keep their dtype. A NaN
    makes every gradient NaN; an infinite element becomes NaN and makes all others 0.

    >>> tx = clip_global_norm(2.5)
    >>> clipped, _ = tx.update({'a': jnp.array([3., 0.]), 'b': jnp.array(4.)}, tx.init({}))
    >>> print(clipped['a'], clipped['b'])  # the norm is 5
    [1.5 0. ] 2.0

    Args:
      max_norm: the norm above which gradients are scaled down; the LAMB authors' code has 1.0.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`, and where gradients have been averaged
        over replicas. The layers of a stack must not be split.

    Raises:
      ValueError: unless max_norm is above 0.
    """
    check_max_norm(max_norm, "max_norm of clip_global_norm")
    checks.check_axis_name(axis_name)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        checks.gradient_leaves(updates, updates if params is None else params)
        checks.check_state(state, optax.EmptyState)
        scale = global_scale(updates, max_norm, axis_name)
        return jax.tree.map(
            lambda g: (g.astype(trust_ratio.compute_dtype(g)) * scale).astype(g.dtype), updates
        ), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def global_scale(
    grads: optax.Updates, max_norm: float | jax.Array, axis_name: AxisName = None
) -> jax.Array:
    """min(1, max_norm / G) as a scalar, float32 or float64 as the gradients are."""
    norm = global_norm(grads, axis_name)
    # 1 + 0 * norm is 1, and NaN where the norm is: a NaN must not pass as a norm below the limit.
    # The inner `where` keeps the derivative finite at a norm of 0.
    return jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1.0), 1.0 + 0.0 * norm)


def global_norm(grads: optax.Updates, axis_name: AxisName = None) -> jax.Array:
    """The l2 norm of all leaves together as a scalar, float32 or float64 as they are."""
    squares: Any = jnp.float32(0.0)
    for path, grad in zip(parameters.leaf_paths(grads), jax.tree.leaves(grads), strict=True):
        axes = trust_ratio.axes_of(axis_name, path)
        # Without layer axes: the layers of a stack count together. The norm then has size 1 along
        # every axis, and the sum below only drops them.
        norm = trust_ratio.leaf_norm(grad, ParameterFacts(), axis_name=axes)
        squares = squares + jnp.sum(norm) ** 2
    return trust_ratio.root(squares)


def check_max_norm(max_norm: Any, name: str = "clip_global_norm") -> None:
    """Raises ValueError unless max_norm is a number above 0, or a wide enough array."""
    if isinstance(max_norm, jax.Array):
        checks.check_range(name, max_norm)
    if isinstance(max_norm, jax.core.Tracer):
        return
    if not checks.is_number(max_norm) or not 0 < max_norm <= math.inf:
        raise ValueError(f"{name} must be above 0, or None for no clipping, not {max_norm!r}")
