r"""The layerwise trust ratio, the one piece that LAMB, LARS and their kin are built from.

For the weights :math:`w` and the direction :math:`u` of one layer,

.. math:: r = c \, \frac{\phi(\|w\|)}{\|u\| + \epsilon}, \qquad
          \phi(z) = \min(\max(z, \gamma_l), \gamma_u)

and the layer's update becomes :math:`r u`. One rule covers tensors of zeros, as in the authors'
code: where :math:`\|w\|` or :math:`\|u\|` is exactly 0 the ratio is `zero_ratio`, by default 1, so
that a zero-initialised tensor leaves zero by the base optimizer's plain step.

Norms are computed in float32 whatever the dtype of the leaf (float64 for a float64 leaf), so
float16 and bfloat16 tensors do not overflow or lose small terms. Under `jit` with shardings they
are norms of the whole tensor by themselves. Inside `shard_map` or `pmap`, where a program sees
its own shard only, give `axis_name`: sums are then taken over that mesh axis.

References:
  You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962: the general strategy,
  phi, and the finding that l1, l2 and linf norms do equally well.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import parameters
from lamb_tpu.optim.parameters import ParameterFacts, Rules

NORMS = ("l2", "l1", "linf")
AxisName = str | tuple[str, ...] | None


class TrustRatioState(NamedTuple):
    """State of `scale_by_trust_ratio`."""

    ratios: Any  # None, or a float32 per leaf, shaped by its layer axes: (), or (num_layers,)


def scale_by_trust_ratio(
    rules: Rules = parameters.DEFAULT_RULES,
    coefficient: float = 1.0,
    eps: float = 0.0,
    norm: str = "l2",
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    zero_ratio: float = 1.0,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformation:
    r"""Scales each layer's update by its trust ratio.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_trust_ratio(collect=True)
    >>> params = {'w': jnp.array([3., 4.]), 'zero': jnp.zeros(2)}
    >>> updates, state = tx.update({'w': jnp.array([.5, 0.]), 'zero': jnp.ones(2)},
    ...                            tx.init(params), params)
    >>> print(updates['w'], updates['zero'], state.ratios['w'])
    [5. 0.] [1. 1.] 10.0

    Args:
      rules: which leaves adapt and which axes stack layers, see `parameters.resolve`.
      coefficient: :math:`c`, the trust coefficient; LARS has 0.001, LAMB 1.
      eps: :math:`\epsilon`, added to the norm of the update.
      norm: 'l2', 'l1' or 'linf'.
      phi_bounds: :math:`(\gamma_l, \gamma_u)`, the bounds on the norm of the weights.
      zero_ratio: the ratio of a layer of which the weights or the update are all 0.
      axis_name: the mesh axis, or axes, over which each leaf is split inside `shard_map` or
        `pmap`. A leaf that is replicated over it has both norms too large by one factor, which
        leaves the ratio right unless `eps` or `phi_bounds` are given.
      collect: keep the ratios in the state, to be plotted.

    Returns:
      A transform whose `update` needs `params`; updates keep their dtype.

    Raises:
      ValueError: for an argument that is out of range, naming it.
    """
    parameters.check_rules(rules)
    check(norm, phi_bounds, {"coefficient": coefficient, "eps": eps, "zero_ratio": zero_ratio})

    def init_fn(params: optax.Params) -> TrustRatioState:
        facts = parameters.resolve(params, rules)
        return TrustRatioState(initial_ratios(params, facts) if collect else None)

    def update_fn(updates: optax.Updates, state: TrustRatioState, params: optax.Params = None):
        del state
        require_params(params)
        treedef = jax.tree.structure(params)
        scaled, ratios = [], []
        for param, update, facts in zip(
            jax.tree.leaves(params),
            treedef.flatten_up_to(updates),
            jax.tree.leaves(parameters.resolve(params, rules)),
            strict=True,
        ):
            value = None
            if facts.adapt:
                value = trust_ratio(
                    leaf_norm(param, facts, norm, axis_name),
                    leaf_norm(update, facts, norm, axis_name),
                    coefficient=coefficient,
                    eps=eps,
                    phi_bounds=phi_bounds,
                    zero_ratio=zero_ratio,
                )
                update = (value * update.astype(compute_dtype(update))).astype(update.dtype)
            scaled.append(update)
            ratios.append(collected(value, param, facts))
        return treedef.unflatten(scaled), TrustRatioState(
            treedef.unflatten(ratios) if collect else None
        )

    return optax.GradientTransformation(init_fn, update_fn)


def leaf_norm(
    leaf: jax.Array, facts: ParameterFacts, norm: str = "l2", axis_name: AxisName = None
) -> jax.Array:
    """The norm of each of a leaf's layers: float32, size 1 along the axes that are reduced.

    Raises NameError when `axis_name` is given where no such axis is bound.
    """
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(compute_dtype(leaf))
    axes = tuple(axis for axis in range(leaf.ndim) if axis not in facts.layer_axes)
    if norm == "linf":
        value = jnp.max(jnp.abs(leaf), axis=axes, keepdims=True, initial=0.0)
        return value if axis_name is None else jax.lax.pmax(value, axis_name)
    value = _sum(jnp.abs(leaf) if norm == "l1" else leaf * leaf, axes)
    if axis_name is not None:
        value = jax.lax.psum(value, axis_name)
    return jnp.sqrt(value) if norm == "l2" else value


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _sum(terms: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum of terms >= 0 over `axes`, kept with size 1."""
    last, window = terms.ndim - 1, 8

    def on_cpu(terms):
        # XLA's CPU compiler writes out all that a large sum reads, at four bytes of fresh memory a
        # parameter, which takes most of an update's time. It fuses a sum of few neighbours, unless
        # it recognises plain addition and hands it to a library: hence |b|, which changes nothing.
        windows = terms.reshape(*terms.shape[:-1], -1, window)
        zero = jnp.zeros((), terms.dtype)
        partial = jax.lax.reduce(windows, zero, lambda a, b: a + jnp.abs(b), (last + 1,))
        return jnp.sum(partial, axis=axes, keepdims=True)

    def elsewhere(terms):
        return jnp.sum(terms, axis=axes, keepdims=True)

    if last not in axes or terms.shape[last] % window or terms.size < 4096:
        return elsewhere(terms)
    return jax.lax.platform_dependent(terms, cpu=on_cpu, default=elsewhere)


def trust_ratio(
    weight_norm: jax.Array,
    update_norm: jax.Array,
    *,
    coefficient: float = 1.0,
    eps: float = 0.0,
    decay: float = 0.0,
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    zero_ratio: float = 1.0,
) -> jax.Array:
    """coefficient * phi(weight_norm) / (update_norm + decay * weight_norm + eps).

    `decay` is for LARS, whose denominator adds the decay's norm to that of the raw gradient. Where
    either norm is 0 the ratio is `zero_ratio`.
    """
    lower, upper = phi_bounds
    phi = weight_norm
    if lower > 0.0:
        phi = jnp.maximum(phi, lower)
    if upper < math.inf:
        phi = jnp.minimum(phi, upper)
    nonzero = (weight_norm > 0.0) & (update_norm > 0.0)
    denominator = update_norm + decay * weight_norm + eps
    ratio = coefficient * phi / jnp.where(nonzero, denominator, 1.0)
    return jnp.where(nonzero, ratio, zero_ratio).astype(weight_norm.dtype)


def initial_ratios(params: optax.Params, facts: Any) -> Any:
    """Ratios of 1 in the shape in which `collected` gives them."""
    return jax.tree.map(lambda param, fact: collected(None, param, fact), params, facts)


def collected(ratio: jax.Array | None, param: jax.Array, facts: ParameterFacts) -> jax.Array:
    """A leaf's ratio for the state: float32, shaped by the layer axes; None counts as 1."""
    shape = tuple(jnp.shape(param)[axis] for axis in facts.layer_axes)
    if ratio is None:
        return jnp.ones(shape, jnp.float32)
    return ratio.astype(jnp.float32).reshape(shape)


def compute_dtype(leaf: Any) -> jnp.dtype:
    """The dtype in which a leaf's arithmetic is done: at least float32."""
    return jnp.promote_types(jnp.result_type(leaf), jnp.float32)


def require_params(params: optax.Params) -> None:
    """Raises ValueError where `update` was called without parameters."""
    if params is None:
        raise ValueError("params is None: call update(grads, state, params)")


def check(norm: str, phi_bounds: tuple[float, float], nonnegative: dict[str, Any]) -> None:
    """Raises ValueError for arguments out of range; values that are traced are not looked at."""
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, not {norm!r}")
    if len(phi_bounds) != 2 or not 0.0 <= phi_bounds[0] <= phi_bounds[1]:
        raise ValueError(f"phi_bounds must be (lower, upper), 0 <= lower <= upper: {phi_bounds!r}")
    for name, value in nonnegative.items():
        check_range(name, value)


def check_range(name: str, value: Any, upper: float = math.inf) -> None:
    """Raises ValueError unless 0 <= value < upper, or when an array is narrower than float32.

    `optax.inject_hyperparams` turns numbers into arrays of the parameters' dtype; in bfloat16
    0.999 is 1.0, and 1 - b2 is lost.
    """
    if isinstance(value, jax.Array):
        if value.dtype.itemsize < 4:
            raise ValueError(
                f"{name} is a {value.dtype} array and has lost digits: "
                "give inject_hyperparams hyperparam_dtype=jnp.float32"
            )
    elif not 0.0 <= value < upper:
        limit = "" if upper == math.inf else f" and below {upper:g}"
        raise ValueError(f"{name} must be at least 0{limit}, not {value!r}")
