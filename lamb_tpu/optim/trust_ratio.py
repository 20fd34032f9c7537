r"""The layerwise trust ratio, the one piece that LAMB, LARS and their kin are built from.

For the weights :math:`w` and the direction :math:`u` of one layer,

.. math:: r = c \, \frac{\phi(\|w\|)}{\|u\| + \epsilon}, \qquad
          \phi(z) = \min(\max(z, \gamma_l), \gamma_u)

and the layer's update becomes :math:`r u`. One rule covers tensors of zeros, as in the authors'
code: where :math:`\|w\|` or :math:`\|u\|` is exactly 0 the ratio is `zero_ratio`, by default 1, so
that a zero-initialised tensor leaves zero by the base optimizer's plain step.

Norms are computed in float32 whatever the dtype of the leaf (float64 for a float64 leaf), so
float16 and bfloat16 tensors do not overflow or lose small terms; of a complex leaf they are real,
:math:`\|z\|^2 = \sum |z_i|^2`. Under `jit` with shardings they
are norms of the whole tensor by themselves. Inside `shard_map` or `pmap`, where a program sees
its own shard only, `axis_name` tells over which mesh axes each leaf is split, see `AxisName`: sums
are then taken over those.

References:
  You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962: the general strategy,
  phi, and the finding that l1, l2 and linf norms do equally well.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu.optim import checks, parameters
from lamb_tpu.optim.parameters import ParameterFacts, Rules

NORMS = ("l2", "l1", "linf")
# The mesh axes over which one leaf is split; None for a leaf that is whole on each device.
MeshAxes = str | tuple[str, ...] | None
# The same of every leaf: those axes where all have the same, or a function of the leaf's path, its
# keys joined by '/' as rules see them. A `PartitionSpec` in their place also says along which of
# the leaf's axes; without one, axes that split the layers of a stack are not among the names.
AxisName = MeshAxes | PartitionSpec | Callable[[str], MeshAxes | PartitionSpec]


class Readings(NamedTuple):
    """Trust ratios and norms of the last update, each a tree shaped like the parameters.

    Every leaf is float32 and shaped by the leaf's layer axes: (), or (num_layers,).
    """

    ratios: Any  # trust ratios; 1 where a leaf does not adapt
    update_norms: Any  # l2 norms of the updates that the transform returns
    weight_norms: Any  # l2 norms of the weights before the update


class TrustRatioState(NamedTuple):
    """State of `scale_by_trust_ratio`."""

    readings: Readings | None


def scale_by_trust_ratio(
    rules: Rules = parameters.DEFAULT_RULES,
    coefficient: float = 1.0,
    eps: float = 0.0,
    norm: str = "l2",
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    ratio_bounds: tuple[float, float] = (0.0, math.inf),
    zero_ratio: float = 1.0,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each layer's update by its trust ratio.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_trust_ratio(collect=True)
    >>> params = {'w': jnp.array([3., 4.]), 'zero': jnp.zeros(2)}
    >>> updates, state = tx.update({'w': jnp.array([.5, 0.]), 'zero': jnp.ones(2)},
    ...                            tx.init(params), params)
    >>> print(updates['w'], updates['zero'], state.readings.ratios['w'])
    [5. 0.] [1. 1.] 10.0

    Args:
      rules: which leaves adapt and which axes stack layers, see `parameters.resolve`.
      coefficient: :math:`c`, the trust coefficient; LARS has 0.001, LAMB 1.
      eps: :math:`\epsilon`, added to the norm of the update.
      norm: 'l2', 'l1' or 'linf'.
      phi_bounds: :math:`(\gamma_l, \gamma_u)`, the bounds on the norm of the weights.
      ratio_bounds: the bounds on the ratio; none in the papers, (0.01, 10) in DeepSpeed.
      zero_ratio: the ratio of a layer of which the weights or the update are all 0.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`; None under
        `jit`. A name, or a tuple of them, holds for every leaf. Where some are whole on each
        device, or leaves are split over different axes, give a function of a leaf's path, its keys
        joined by '/', to a name, a tuple or None. Never name an axis that splits the layers of a
        stack. A `PartitionSpec` in place of names says along which axes of the leaf, so it may
        split layers, and matrices of `apollo`. Under `optax.inject_hyperparams` a function must be
        among the `static_args`.
      collect: keep each layer's ratio and norms in the state, see `readings.read`.

    Returns:
      A transform whose `update` needs `params`; updates keep their dtype.

    Raises:
      ValueError: for an argument that is out of range, naming it.
    """
    parameters.check_rules(rules)
    check(norm, phi_bounds, {"coefficient": coefficient, "eps": eps, "zero_ratio": zero_ratio})
    checks.check_bounds("ratio_bounds", ratio_bounds)
    checks.check_flag("collect", collect)
    checks.check_axis_name(axis_name)

    def init_fn(params: optax.Params) -> TrustRatioState:
        facts = parameters.resolve(params, rules)
        return TrustRatioState(initial_readings(params, facts) if collect else None)

    def update_fn(
        updates: optax.Updates,
        state: TrustRatioState,
        params: optax.Params = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, TrustRatioState]:
        del extra_args
        grads = checks.gradient_leaves(updates, params)
        checks.check_state(state, TrustRatioState)
        treedef = jax.tree.structure(params)
        scaled, read = [], []
        for param, update, facts, path in zip(
            jax.tree.leaves(params),
            grads,
            jax.tree.leaves(parameters.resolve(params, rules)),
            parameters.leaf_paths(params),
            strict=True,
        ):
            axes, value = axes_of(axis_name, path, facts.layer_axes), None
            if facts.adapt:
                value = trust_ratio(
                    leaf_norm(param, facts, norm, axes),
                    leaf_norm(update, facts, norm, axes),
                    coefficient=coefficient,
                    eps=eps,
                    phi_bounds=phi_bounds,
                    ratio_bounds=ratio_bounds,
                    zero_ratio=zero_ratio,
                )
                # The product is taken in float32 too, and rounded once to the update's own dtype.
                update = (value * update.astype(compute_dtype(update))).astype(update.dtype)
            scaled.append(update)
            if collect:
                read.append(leaf_readings(value, update, param, facts, axes))
        return treedef.unflatten(scaled), TrustRatioState(
            readings_of(treedef, read) if collect else None
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def axes_of(axis_name: AxisName, path: str, layer_axes: Sequence[int] = ()) -> MeshAxes:
    """The mesh axes over which the leaf of a path is split, beside its layer axes.

    Only a `PartitionSpec` tells which those are; of names, none may split layers.

    Raises ValueError for anything else than a name, a tuple of names, a spec or None.
    """
    axes = axis_name(path) if callable(axis_name) else axis_name
    names: Any = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    # An entry of a spec is a mesh axis, a tuple of them, or None for an axis that is whole. Layer
    # axes are left out: their norms must stay apart.
    if isinstance(axes, PartitionSpec):
        names = tuple(
            name
            for axis, entry in enumerate(axes)
            if axis not in layer_axes
            for name in (entry if isinstance(entry, tuple) else () if entry is None else (entry,))
        )
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            "axis_name must give a mesh axis, a tuple of them, a PartitionSpec or None for the "
            f"parameter {path!r}, not {axes!r}"
        )
    return names or None if isinstance(axes, PartitionSpec) else axes


def leaf_norm(
    leaf: jax.Array, facts: ParameterFacts, norm: str = "l2", axis_name: MeshAxes = None
) -> jax.Array:
    """The norm of each of a leaf's layers: float32, size 1 along the axes that are reduced.

    The derivative of an l2 norm at 0 is 0, not NaN.

    Raises ValueError when `axis_name` is given where no such axis is bound.
    """
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(compute_dtype(leaf))
    axes = tuple(axis for axis in range(leaf.ndim) if axis not in facts.layer_axes)
    # `initial` lets a leaf of size 0 have a maximum.
    if norm == "linf":
        value = jnp.max(jnp.abs(leaf), axis=axes, keepdims=True, initial=0.0)
        return over(jax.lax.pmax, value, axis_name)
    terms = jnp.abs(leaf) if norm == "l1" else real_product(leaf, leaf)
    # The parts' sums of squares add up to that of the whole leaf. Their roots would not.
    value = over(jax.lax.psum, _sum(terms, axes), axis_name)
    return root(value) if norm == "l2" else value


def leaf_mean(leaf: jax.Array, facts: ParameterFacts, axis_name: MeshAxes = None) -> jax.Array:
    """The mean of each of a leaf's layers, of values >= 0, shaped as `leaf_norm`."""
    total = leaf_norm(leaf, facts, "l1", axis_name)
    # A leaf without elements has the mean 0. A stack of no layers has no means.
    count = max(math.prod(leaf.shape) / max(math.prod(collected_shape(leaf, facts)), 1), 1)
    # The psum of a Python number is a product with the axis size; nothing is sent.
    return total / over(jax.lax.psum, count, axis_name)


def over(collective: Callable[..., Any], value: Any, axis_name: MeshAxes) -> Any:
    """`collective(value, axis_name)`; the value itself where there is no axis.

    Raises ValueError when `axis_name` is given where no such axis is bound.
    """
    if not axis_name:
        return value
    if not is_bound(axis_name):
        raise ValueError(
            f"axis_name {axis_name!r} is not bound here: give it inside shard_map or pmap over "
            "that axis, and leave it out under jit"
        )
    return collective(value, axis_name)


def is_bound(axis_name: str | tuple[str, ...]) -> bool:
    """Returns True inside `shard_map` or `pmap` over the mesh axes."""
    try:
        # This raises NameError for an axis that is not bound.
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


@jax.custom_jvp
def root(value: jax.Array) -> jax.Array:
    """The square root of values >= 0, with the derivative 0 at 0, where that of `sqrt` is inf.

    What is squared below a root has the derivative 0 there, and inf * 0 would be NaN.
    """
    return jnp.sqrt(value)


@root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (value,), (tangent,) = primals, tangents
    result = root(value)
    at_zero = value == 0.0
    # The inner `where` keeps the 0 out of the division. Otherwise second derivatives would be NaN,
    # because `where` differentiates both of its branches.
    slope = tangent / (2.0 * jnp.where(at_zero, 1.0, result))
    return result, jnp.where(at_zero, 0.0, slope)


def real_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of real arrays; of complex ones the real part of a times the conjugate of b."""
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
        return a.real * b.real + a.imag * b.imag
    return a * b


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _sum(terms: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum of terms >= 0 over `axes`, kept with size 1."""
    last = terms.ndim - 1

    def on_cpu(terms: jax.Array, window: tuple[int, int]) -> jax.Array:
        # XLA's CPU compiler writes out all that a large sum reads, at four bytes of fresh memory a
        # parameter, which takes most of an update's time. It fuses a sum of few terms (64 are too
        # many, 32 take twice the time of 16), unless it recognises plain addition and hands it to
        # a library: hence |b|, which changes nothing. Terms 8 apart fill a vector unit's lanes.
        windows = terms.reshape(*terms.shape[:-1], -1, *window)
        zero = jnp.zeros((), terms.dtype)
        partial = jax.lax.reduce(windows, zero, lambda a, b: a + jnp.abs(b), (last + 1,))
        partial = partial.reshape(*terms.shape[:-1], -1)
        return jnp.sum(partial, axis=axes, keepdims=True)

    def elsewhere(terms: jax.Array) -> jax.Array:
        return jnp.sum(terms, axis=axes, keepdims=True)

    if last not in axes or terms.size < 4096:
        return elsewhere(terms)
    # Where a mesh splits the last axis, the partitioner must never have to cut through a window:
    # all-reduces know plain addition only. Explicit meshes do not reshape an axis that is split.
    explicit = jax.typeof(terms).sharding.spec[last] is not None
    for window in ((16, 8), (8, 1)):  # (terms of a sum, sums side by side)
        if not explicit and terms.shape[last] % (math.prod(window) * jax.device_count()) == 0:
            cpu = functools.partial(on_cpu, window=window)
            return jax.lax.platform_dependent(terms, cpu=cpu, default=elsewhere)
    return elsewhere(terms)


def trust_ratio(
    weight_norm: jax.Array,
    update_norm: jax.Array,
    *,
    coefficient: float = 1.0,
    eps: float = 0.0,
    decay: float | jax.Array = 0.0,
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    ratio_bounds: tuple[float, float] = (0.0, math.inf),
    zero_ratio: float = 1.0,
) -> jax.Array:
    """coefficient * phi(weight_norm) / (update_norm + decay * weight_norm + eps), within bounds.

    `decay` is for LARS, whose denominator adds the decay's norm to that of the raw gradient. Where
    either norm is 0 the ratio is `zero_ratio`, which the bounds leave alone. NaN stays NaN.
    """
    phi = _clip(weight_norm, phi_bounds)
    zero = (weight_norm == 0.0) | (update_norm == 0.0)
    denominator = update_norm + decay * weight_norm + eps
    # The 1.0 stands in for a denominator that may be 0, so that the branch which is not taken has a
    # finite derivative.
    ratio = _clip(coefficient * phi / jnp.where(zero, 1.0, denominator), ratio_bounds)
    return jnp.where(zero, zero_ratio, ratio).astype(weight_norm.dtype)


def _clip(value: jax.Array, bounds: tuple[float, float]) -> jax.Array:
    lower, upper = bounds
    # Bounds that bind nothing add no operation. Maximum and minimum pass NaN on.
    if lower > 0.0:
        value = jnp.maximum(value, lower)
    return jnp.minimum(value, upper) if upper < math.inf else value


def initial_readings(params: optax.Params, facts: Any) -> Readings:
    """Readings before the first update: ratios of 1 and norms of 0."""

    def filled(value: float) -> Any:
        return jax.tree.map(
            lambda param, fact: jnp.full(collected_shape(param, fact), value, jnp.float32),
            params,
            facts,
        )

    return Readings(filled(1.0), filled(0.0), filled(0.0))


def leaf_readings(
    ratio: jax.Array | None,
    update: jax.Array,
    weights: jax.Array,
    facts: ParameterFacts,
    axis_name: MeshAxes = None,
) -> tuple[jax.Array, ...]:
    """The fields of `Readings` of one leaf; the ratio None counts as 1."""
    shape = collected_shape(weights, facts)
    # The norms have size 1 along the axes that they reduce. A reading has the layer axes only.
    ratio = jnp.ones(shape) if ratio is None else ratio
    norms = (leaf_norm(leaf, facts, axis_name=axis_name) for leaf in (update, weights))
    return tuple(_whole(value.astype(jnp.float32).reshape(shape)) for value in (ratio, *norms))


def _whole(reading: jax.Array) -> jax.Array:
    # A reading would follow a layer axis that is split, and `jit` compile the next update anew for
    # a state that is placed, or on an Explicit mesh typed, otherwise than this one was. It is whole
    # on each device, as `sharding.state_sharding` has it.
    sharding = jax.typeof(reading).sharding
    whole = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec())
    if any(sharding.spec):
        reading = jax.sharding.reshard(reading, whole)
    if AxisType.Auto in sharding.mesh.axis_types and isinstance(reading, jax.core.Tracer):
        reading = jax.lax.with_sharding_constraint(reading, whole)
    return reading


def readings_of(treedef: Any, rows: Sequence[tuple[jax.Array, ...]]) -> Readings:
    """`Readings` from those of each leaf, in the order of `treedef`."""
    # `zip` of no rows gives no columns, and a tree without leaves needs three empty ones.
    columns = zip(*rows) if rows else ((),) * len(Readings._fields)
    return Readings(*(treedef.unflatten(column) for column in columns))


def collected_shape(leaf: jax.Array, facts: ParameterFacts) -> tuple[int, ...]:
    """One entry for each layer that a leaf stacks: (), or (num_layers,)."""
    return tuple(jnp.shape(leaf)[axis] for axis in facts.layer_axes)


def compute_dtype(leaf: Any) -> jnp.dtype:
    """The dtype in which a leaf's arithmetic is done: at least float32, complex for complex."""
    with jax.numpy_dtype_promotion("standard"):  # this promotion is meant
        return jnp.promote_types(jnp.result_type(leaf), jnp.float32)


def real_dtype(leaf: Any) -> jnp.dtype:
    """The real dtype of the same width, for norms, rates and second moments."""
    return np.zeros((), compute_dtype(leaf)).real.dtype


def check(norm: str, phi_bounds: tuple[float, float], nonnegative: dict[str, Any]) -> None:
    """Raises ValueError for arguments out of range; traced values pass."""
    checks.check_choice("norm", norm, NORMS)
    checks.check_bounds("phi_bounds", phi_bounds)
    for name, value in nonnegative.items():
        checks.check_range(name, value)
