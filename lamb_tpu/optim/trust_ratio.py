r"""The layerwise trust ratio, the basis of LAMB, LARS and similar optimizers.

For the weights :math:`w` and the direction :math:`u` of one layer,

.. math:: r = c \, \frac{\phi(\|w\|)}{\|u\| + \epsilon}, \qquad
          \phi(z) = \min(\max(z, \gamma_l), \gamma_u)

and the layer's update becomes :math:`r u`. If :math:`\|w\|` or :math:`\|u\|` is exactly 0, the
ratio is `zero_ratio`, by default 1, as in the authors' code. The first step of a zero-initialised
tensor is therefore a plain step of the base optimizer.

Norms are computed in float32 (float64 for a float64 leaf) whatever the dtype of the leaf, so norms
of float16 and bfloat16 tensors do not overflow or lose small terms. Norms of complex leaves are
real, :math:`\|z\|^2 = \sum |z_i|^2`. Under `jit`, norms cover full leaves for any sharding, without
`axis_name`. Inside `shard_map` or `pmap` a program only sees one shard of a leaf. There `axis_name` must
give the mesh axes over which each leaf is split, see `AxisName`; sums of squares are added over
these axes.

References:
  You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962: the general strategy,
  phi, and the finding that l1, l2 and linf norms do equally well.
"""

import dataclasses
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
from lamb_tpu.optim.parameters import ParameterMetadata, Rules

NORMS = ("l2", "l1", "linf")
# The mesh axes over which one leaf is split; None for a leaf that is full on each device.
MeshAxes = str | tuple[str, ...] | None
# The mesh axes over which leaves are split: the same for all leaves, or a function of a leaf's path
# (as in rules). A `PartitionSpec` also says which axes of the leaf are split. If you give names
# instead, leave out mesh axes that split the layers of a stack.
AxisName = MeshAxes | PartitionSpec | Callable[[str], MeshAxes | PartitionSpec]


class Diagnostics(NamedTuple):
    """Trust ratios and norms of the last update; each field is a tree like the parameters.

    Every array is float32 and has the shape of the parameter's layer axes: () or (num_layers,).
    """

    ratios: Any  # trust ratios; 1 if a leaf does not adapt
    update_norms: Any  # l2 norms of the updates that the transform returns
    weight_norms: Any  # l2 norms of the weights before the update


class TrustRatioState(NamedTuple):
    """State of `scale_by_trust_ratio`."""

    diagnostics: Diagnostics | None


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
    >>> print(updates['w'], updates['zero'], state.diagnostics.ratios['w'])
    [5. 0.] [1. 1.] 10.0

    Args:
      rules: which leaves adapt and which axes stack layers, see `parameters.resolve`.
      coefficient: :math:`c`, the trust coefficient; 0.001 in LARS, 1 in LAMB.
      eps: :math:`\epsilon`, added to the norm of the update.
      norm: 'l2', 'l1' or 'linf'.
      phi_bounds: :math:`(\gamma_l, \gamma_u)`, the bounds on the norm of the weights.
      ratio_bounds: the bounds on the ratio; none in the papers, (0.01, 10) in DeepSpeed.
      zero_ratio: the ratio of a layer if its weights or its update are all 0.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`; None under
        `jit`. A name, or a tuple of names, applies to every leaf. If some leaves are full on each
        device, or leaves are split over different axes, give a function from a leaf's path (its
        keys joined by '/') to a name, a tuple or None. Do not name a mesh axis that splits the
        layers of a stack. In place of names you may give a `PartitionSpec`, which says which axes
        of the leaf are split. Then the layers of a stack may be split, and so may `apollo`'s
        matrices. Under `optax.inject_hyperparams`, a function must be in `static_args`.
      collect: whether to store each layer's ratio and norms in the state, see `diagnostics.read`.

    Returns:
      A transform whose `update` needs `params`; updates keep their dtype.

    Raises:
      ValueError: an argument or a rule is invalid; from `init`, the rules do not fit the
        parameters.
    """
    checks.checked(scale_by_trust_ratio, locals())
    checks.check_choices(norm=(norm, NORMS))
    parameters.check_rules(rules)
    layer_ratio = LayerRatio(norm, coefficient, eps, phi_bounds, ratio_bounds, zero_ratio)

    def init_fn(params: optax.Params) -> TrustRatioState:
        parameters.resolve(params, rules)
        return TrustRatioState(initial_diagnostics(params, rules) if collect else None)

    def update_fn(
        updates: optax.Updates, state: TrustRatioState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, TrustRatioState]:
        del extra
        grads = checks.gradient_leaves(updates, params)
        checks.check_state(state, TrustRatioState)
        treedef = jax.tree.structure(params)
        scaled, read = [], []
        rows = parameters.rows(params, rules)
        for update, (path, param, metadata) in zip(grads, rows, strict=True):
            axes, value = axes_of(axis_name, path, metadata.layer_axes), None
            if metadata.adapt:
                value = layer_ratio.of(param, update, metadata, axes)
                # Compute the product in float32 too, and round once to the update's dtype.
                update = (value * update.astype(compute_dtype(update))).astype(update.dtype)
            scaled.append(update)
            if collect:
                read.append(leaf_diagnostics(value, update, param, metadata, axes))
        return treedef.unflatten(scaled), TrustRatioState(
            diagnostics_of(treedef, read) if collect else None
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def axes_of(axis_name: AxisName, path: str, layer_axes: Sequence[int] = ()) -> MeshAxes:
    """Returns the mesh axes that split a leaf along axes other than its layer axes.

    Only a `PartitionSpec` says which axes of the leaf are split; if `axis_name` has names, these
    mesh axes must not split layers. Raises ValueError for values that are not an `AxisName`.
    """
    axes = axis_name(path) if callable(axis_name) else axis_name
    names: Any = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    # An entry of a spec is a mesh axis, a tuple of mesh axes, or None for an axis that is not
    # split. Leave out the entries of layer axes, because norms of different layers must not be
    # added.
    if isinstance(axes, PartitionSpec):
        names = tuple(
            name
            for axis, entry in enumerate(axes)
            if axis not in layer_axes
            for name in (entry if isinstance(entry, tuple) else () if entry is None else (entry,))
        )
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"for the parameter {path!r}, axis_name={axes!r} must be a mesh axis, a tuple of mesh "
            "axes, a PartitionSpec or None"
        )
    return names or None if isinstance(axes, PartitionSpec) else axes


def leaf_norm(
    leaf: jax.Array, metadata: ParameterMetadata, norm: str = "l2", axis_name: MeshAxes = None
) -> jax.Array:
    """Returns the norm of each layer of a leaf, at least float32, with size 1 along reduced axes.

    The derivative of an l2 norm at 0 is 0, not NaN.
    """
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(compute_dtype(leaf))
    axes = tuple(axis for axis in range(leaf.ndim) if axis not in metadata.layer_axes)
    # `initial` defines the maximum of a leaf of size 0.
    if norm == "linf":
        value = jnp.max(jnp.abs(leaf), axis=axes, keepdims=True, initial=0.0)
        return over(jax.lax.pmax, value, axis_name)
    terms = jnp.abs(leaf) if norm == "l1" else real_product(leaf, leaf)
    # Sum over shards before the root: sums of squares add up, norms do not.
    value = over(jax.lax.psum, _sum(terms, axes), axis_name)
    return root(value) if norm == "l2" else value


def leaf_mean(
    leaf: jax.Array, metadata: ParameterMetadata, axis_name: MeshAxes = None
) -> jax.Array:
    """Returns the mean of each layer of a leaf, whose values must be >= 0, in the shape of `leaf_norm`."""
    total = leaf_norm(leaf, metadata, "l1", axis_name)
    # If a layer has no elements, its mean is 0. A stack without layers has no means.
    count = max(math.prod(leaf.shape) / max(math.prod(collected_shape(leaf, metadata)), 1), 1)
    # The psum of a Python number multiplies it by the axis size, without communication.
    return total / over(jax.lax.psum, count, axis_name)


def over(collective: Callable[..., Any], value: Any, axis_name: MeshAxes) -> Any:
    """Returns `collective(value, axis_name)`, or the value if `axis_name` is empty or None."""
    if not axis_name:
        return value
    if not is_bound(axis_name):
        raise ValueError(
            f"axis_name={axis_name!r} is not bound here; use it inside shard_map or pmap over "
            "this mesh axis, and leave axis_name out under jit"
        )
    return collective(value, axis_name)


def is_bound(axis_name: str | tuple[str, ...]) -> bool:
    """Returns whether the code runs inside `shard_map` or `pmap` over the mesh axes."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


@jax.custom_jvp
def root(value: jax.Array) -> jax.Array:
    """Returns the square root of `value`, which must be >= 0; its derivative at 0 is 0, not inf.

    In the norm of a zero tensor, the derivative of the squares is 0, and inf * 0 would be NaN.
    """
    return jnp.sqrt(value)


@root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (value,), (tangent,) = primals, tangents
    result = root(value)
    at_zero = value == 0.0
    # The inner `where` avoids a division by 0. Otherwise second derivatives would be NaN, because
    # `where` differentiates both of its branches.
    slope = tangent / (2.0 * jnp.where(at_zero, 1.0, result))
    return result, jnp.where(at_zero, 0.0, slope)


def real_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a * b for real arrays, and the real part of a * conj(b) for complex arrays."""
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
        return a.real * b.real + a.imag * b.imag
    return a * b


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _sum(terms: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the sum of `terms`, which must all be >= 0, over `axes`, with size 1 along these axes."""
    last = terms.ndim - 1

    def on_cpu(terms: jax.Array, window: tuple[int, int]) -> jax.Array:
        # XLA's CPU compiler writes the input of a large sum to newly allocated memory, four bytes
        # per parameter, which takes most of an update's time. It can fuse a sum of few terms with
        # the computation of the terms: 64 terms are too many, and 32 take twice the time of 16. But
        # if it recognises a plain addition, it calls a library instead. The function a + |b| hides
        # the addition; the result is the same, because terms are >= 0. Each sum adds terms at a
        # distance of 8, so that 8 sums fill the lanes of a vector unit.
        windows = terms.reshape(*terms.shape[:-1], -1, *window)
        zero = jnp.zeros((), terms.dtype)
        partial = jax.lax.reduce(windows, zero, lambda a, b: a + jnp.abs(b), (last + 1,))
        partial = partial.reshape(*terms.shape[:-1], -1)
        return jnp.sum(partial, axis=axes, keepdims=True)

    def elsewhere(terms: jax.Array) -> jax.Array:
        return jnp.sum(terms, axis=axes, keepdims=True)

    if last not in axes or terms.size < 4096:
        return elsewhere(terms)
    # If a mesh splits the last axis, no window may cross a shard boundary, because an all-reduce
    # only supports plain addition. On an Explicit mesh a split axis cannot be reshaped.
    explicit = jax.typeof(terms).sharding.spec[last] is not None
    for window in ((16, 8), (8, 1)):  # (terms of a sum, sums side by side)
        if not explicit and terms.shape[last] % (math.prod(window) * jax.device_count()) == 0:
            cpu = functools.partial(on_cpu, window=window)
            return jax.lax.platform_dependent(terms, cpu=cpu, default=elsewhere)
    return elsewhere(terms)


@dataclasses.dataclass(frozen=True, eq=False)  # fields may be arrays
class LayerRatio:
    """Computes the trust ratio of each layer; `scale_by_trust_ratio` describes the fields."""

    norm: str = "l2"
    coefficient: float = 1.0
    eps: float = 0.0
    phi_bounds: tuple[float, float] = (0.0, math.inf)
    ratio_bounds: tuple[float, float] = (0.0, math.inf)
    zero_ratio: float = 1.0

    def of(
        self,
        weights: jax.Array,
        update: jax.Array,
        metadata: ParameterMetadata,
        axis_name: MeshAxes = None,
    ) -> jax.Array:
        """Returns the ratio of each layer of a leaf."""
        leaves = (weights, update)
        return self.of_norms(*(leaf_norm(x, metadata, self.norm, axis_name) for x in leaves))

    def of_norms(
        self, weight_norm: jax.Array, update_norm: jax.Array, decay: float | jax.Array = 0.0
    ) -> jax.Array:
        """Returns coefficient * phi(weight_norm) / (update_norm + decay * weight_norm + eps), bounded.

        `decay` is for LARS: its denominator adds the norm of the decay to the norm of the raw
        gradient. If either norm is 0, the ratio is `zero_ratio`, without bounds. If a norm is NaN,
        so is the ratio.
        """
        phi = _clip(weight_norm, self.phi_bounds)
        zero = (weight_norm == 0.0) | (update_norm == 0.0)
        denominator = update_norm + decay * weight_norm + self.eps
        # Where the denominator may be 0, divide by 1.0 instead, so that the unused branch of the
        # last `where` has a finite derivative.
        ratio = self.coefficient * phi / jnp.where(zero, 1.0, denominator)
        ratio = _clip(ratio, self.ratio_bounds)
        return jnp.where(zero, self.zero_ratio, ratio).astype(weight_norm.dtype)


def _clip(value: jax.Array, bounds: tuple[float, float]) -> jax.Array:
    lower, upper = bounds
    # Skip bounds that have no effect. `maximum` and `minimum` propagate NaN.
    if lower > 0.0:
        value = jnp.maximum(value, lower)
    return jnp.minimum(value, upper) if upper < math.inf else value


def initial_diagnostics(params: optax.Params, rules: Rules) -> Diagnostics:
    """Returns the diagnostics before the first update: ratios of 1 and norms of 0."""
    rows = [
        tuple(jnp.full(collected_shape(leaf, meta), value, jnp.float32) for value in (1, 0, 0))
        for _, leaf, meta in parameters.rows(params, rules)
    ]
    return diagnostics_of(jax.tree.structure(params), rows)


def leaf_diagnostics(
    ratio: jax.Array | None,
    update: jax.Array,
    weights: jax.Array,
    metadata: ParameterMetadata,
    axis_name: MeshAxes = None,
) -> tuple[jax.Array, ...]:
    """Returns the fields of `Diagnostics` for one leaf; a ratio of None counts as 1."""
    shape = collected_shape(weights, metadata)
    # Norms have size 1 along the reduced axes; drop these axes for the diagnostics.
    ratio = jnp.ones(shape) if ratio is None else ratio
    norms = (leaf_norm(leaf, metadata, axis_name=axis_name) for leaf in (update, weights))
    return tuple(_replicated(value.astype(jnp.float32).reshape(shape)) for value in (ratio, *norms))


def _replicated(value: jax.Array) -> jax.Array:
    # If a layer axis is split, the value would be sharded too. But the diagnostics in the state
    # before the first update are replicated, as in `sharding.state_sharding`. The next update would
    # get a state with another sharding (on an Explicit mesh another type), and `jit` would compile
    # it again.
    sharding = jax.typeof(value).sharding
    replicated = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec())
    if any(sharding.spec):
        value = jax.sharding.reshard(value, replicated)
    if AxisType.Auto in sharding.mesh.axis_types and isinstance(value, jax.core.Tracer):
        value = jax.lax.with_sharding_constraint(value, replicated)
    return value


def diagnostics_of(treedef: Any, rows: Sequence[tuple[jax.Array, ...]]) -> Diagnostics:
    """Returns the diagnostics of all leaves; `rows` has the `leaf_diagnostics` in tree order."""
    return Diagnostics(*columns(treedef, rows, len(Diagnostics._fields)))


def columns(treedef: Any, rows: Sequence[tuple], width: int) -> list[Any]:
    """Returns a tree for each column of `rows`; there is one row per leaf."""
    # Without rows, `zip` returns no columns, but a tree without leaves needs `width` columns too.
    return [treedef.unflatten(values) for values in (zip(*rows) if rows else ((),) * width)]


def collected_shape(leaf: jax.Array, metadata: ParameterMetadata) -> tuple[int, ...]:
    """Returns the sizes of a leaf's layer axes: () or (num_layers,)."""
    return tuple(jnp.shape(leaf)[axis] for axis in metadata.layer_axes)


def compute_dtype(leaf: Any) -> jnp.dtype:
    """Returns the dtype of a leaf's arithmetic: at least float32, and complex for a complex leaf."""
    with jax.numpy_dtype_promotion("standard"):  # strict promotion would reject the two dtypes
        return jnp.promote_types(jnp.result_type(leaf), jnp.float32)


def real_dtype(leaf: Any) -> jnp.dtype:
    """Returns the real dtype with the precision of `compute_dtype`, for norms and second moments."""
    return np.zeros((), compute_dtype(leaf)).real.dtype
