"""Clipping by the global norm of all gradients, even inside `shard_map` and `pmap`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.parameters import ParameterMetadata
from lamb_tpu.optim.trust_ratio import AxisName


def clip_global_norm(
    max_norm: float, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Scales all gradients by min(1, max_norm / G), where G is their global l2 norm.

    The norm and the product are computed in at least float32; gradients keep their dtype. A NaN
    makes every gradient NaN. An infinite element becomes NaN and makes all others 0.

    >>> tx = clip_global_norm(2.5)
    >>> clipped, _ = tx.update({'a': jnp.array([3., 0.]), 'b': jnp.array(4.)}, tx.init({}))
    >>> print(clipped['a'], clipped['b'])  # the norm is 5
    [1.5 0. ] 2.0

    Args:
      max_norm: the largest global norm, above 0; 1.0 in the LAMB authors' code.
      axis_name: see `lamb_tpu.optim`. None if each device has the full gradients, for example after
        they have been averaged over replicas. The layers of a stack must not be split.

    Raises:
      ValueError: max_norm or axis_name is invalid; from `update`, the gradients have another
        structure or other shapes than `params`.
    """
    check_max_norm(max_norm, "clip_global_norm: max_norm")
    checks.check_axis_name(axis_name)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra
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
    """Returns min(1, max_norm / global norm) as a float32 scalar, or float64 for float64 gradients."""
    norm = global_norm(grads, axis_name)
    # A comparison with NaN is False, but a NaN norm must give NaN: 1 + 0 * norm is NaN for NaN and
    # 1 for a finite norm. The inner `where` keeps the derivative finite at a norm of 0.
    return jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1.0), 1.0 + 0.0 * norm)


def global_norm(grads: optax.Updates, axis_name: AxisName = None) -> jax.Array:
    """Returns the global l2 norm of all leaves as a float32 scalar, or float64 for float64 leaves."""
    squares: Any = jnp.float32(0.0)
    for path, grad in zip(parameters.leaf_paths(grads), jax.tree.leaves(grads), strict=True):
        axes = trust_ratio.axes_of(axis_name, path)
        # Without layer axes, one norm covers all layers of a stack. The norm has size 1 along every
        # axis, and `jnp.sum` below only drops these axes.
        norm = trust_ratio.leaf_norm(grad, ParameterMetadata(), axis_name=axes)
        squares = squares + jnp.sum(norm) ** 2
    return trust_ratio.root(squares)


def check_max_norm(max_norm: Any, name: str = "clip_global_norm") -> None:
    """Raises ValueError unless max_norm is above 0; also rejects JAX arrays narrower than float32."""
    if isinstance(max_norm, jax.Array):
        checks.check_range(name, max_norm)
    if isinstance(max_norm, jax.core.Tracer):
        return
    if not checks.is_number(max_norm) or not 0 < max_norm <= math.inf:
        raise ValueError(f"{name}={max_norm!r} must be above 0; leave it out for no clipping")
