"""Builds a transform from functions of one leaf, for every optimizer here.

An optimizer is two functions of one leaf: its initial buffers, and its step in float32. This file
gives each leaf its facts and its learning rate, widens narrow dtypes and narrows the update again,
clips by the global norm before anything else, counts updates and, where asked, reads out norms.

Complex leaves are treated as Optax treats them: second moments and norms take |g|^2 and are real,
whatever else is linear is complex. Gradients are to be given as directions of steepest ascent:
`jax.grad` of a real loss gives the conjugates of those.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import checks, clipping, parameters, splits, trust_ratio
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, MeshAxes, Readings


class Leaf(NamedTuple):
    """One leaf as a step gets it, in float32 at least (float64 for float64 leaves).

    The gradient and the weights of a complex leaf are complex; all else is real.
    """

    grad: jax.Array
    weights: jax.Array
    facts: ParameterFacts
    rate: jax.Array  # (): the learning rate of this update, times the leaf's rate factor
    completed: jax.Array  # int32, (): updates before this one
    index: int  # type: ignore[assignment]  # the leaf's place in jax.tree.leaves(params)
    count: jax.Array  # type: ignore[assignment]  # int32, (): updates with this one
    path: str  # its keys joined by '/'
    split: Split  # its whole shape, and over which mesh axes it is split along which of its axes

    @property
    def axis_name(self) -> MeshAxes:
        """The mesh axes over which the leaf is split, for norms and means."""
        return self.split.axis_name


# (leaf, its facts, how it is split over mesh axes that are bound) -> buffers
InitLeaf = Callable[[jax.Array, ParameterFacts, Split], tuple[Any, ...]]
# (leaf, *buffers) -> (update, buffers, the trust ratio, or None where there is none)
Step = tuple[jax.Array, tuple[Any, ...], jax.Array | None]
StepLeaf = Callable[..., Step]


def transform(
    state_type: type[NamedTuple],
    init_leaf: InitLeaf,
    step_leaf: StepLeaf,
    learning_rate: optax.ScalarOrSchedule,
    rules: Rules,
    *,
    clip_global_norm: float | None = None,
    axis_name: AxisName = None,
    collect: bool = False,
    real_only: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transform made of functions of one leaf; `update` ignores extra arguments.

    Args:
      state_type: a NamedTuple with the fields `count`, one for each buffer in the order in which
        `init_leaf` gives them, and last, where it collects any, `readings`.
      init_leaf: the buffers of a leaf before the first update.
      step_leaf: the leaf's update, new buffers with the shapes and dtypes of the old, and ratio.
      learning_rate: a number, or a schedule of the count of completed updates.
      rules: see `parameters.resolve`.
      clip_global_norm: see `clipping.clip_global_norm`; None for none.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`.
      collect: keep `Readings` in the state.
      real_only: the argument that has no meaning for complex leaves; None where all have.

    Raises:
      ValueError: a negative learning rate, rules that are not rules, clip_global_norm not above 0;
        from `init`, a complex leaf where `real_only` is given.
    """
    parameters.check_rules(rules)
    checks.check_flag("collect", collect)
    checks.check_schedule("learning_rate", learning_rate)
    checks.check_axis_name(axis_name)
    if clip_global_norm is not None:
        clipping.check_max_norm(clip_global_norm)
    # The fields of a state are the count, the buffers, and the readings.
    reads = state_type._fields[-1] == "readings"  # links of chains have none
    num_buffers = len(state_type._fields) - 1 - reads

    def columns(treedef: Any, rows: list[tuple], width: int) -> list[Any]:
        # `zip` of no rows gives no columns; a tree without leaves still needs `width` of them.
        return [treedef.unflatten(c) for c in (zip(*rows) if rows else ((),) * width)]

    def init_fn(params: optax.Params) -> Any:
        facts = parameters.resolve(params, rules)
        leaves, treedef = jax.tree.flatten(params)
        rows = []
        for path, param, fact in zip(
            parameters.leaf_paths(params), leaves, jax.tree.leaves(facts), strict=True
        ):
            if real_only and jnp.iscomplexobj(param):
                raise ValueError(
                    f"{real_only} compares signs, which complex numbers do not have: the parameter "
                    f"{path!r} is {jnp.result_type(param)}"
                )
            axes = trust_ratio.axes_of(axis_name, path)
            # Outside shard_map, as where `sharding.state_sharding` asks for shapes, none is bound.
            split = splits.whole(jnp.shape(param))
            if axes and trust_ratio.is_bound(axes):
                split = splits.split_of(axis_name, path, jnp.shape(param), fact)
            rows.append(init_leaf(param, fact, split))
        buffers = columns(treedef, rows, num_buffers)
        readings = trust_ratio.initial_readings(params, facts) if collect else None
        return state_type._make(
            (jnp.zeros((), jnp.int32), *buffers, *((readings,) if reads else ()))
        )

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        grads = checks.gradient_leaves(updates, params)
        checks.check_state(state, state_type)
        treedef = jax.tree.structure(params)
        # The global norm needs all gradients, so it precedes the walk over the leaves.
        scale = None
        if clip_global_norm is not None:
            scale = clipping.global_scale(treedef.unflatten(grads), clip_global_norm, axis_name)
        try:
            # Not `jax.tree.leaves`, which would drop the None of a leaf that has no such buffer.
            buffers = [treedef.flatten_up_to(tree) for tree in state[1 : 1 + num_buffers]]
        except ValueError as error:
            raise ValueError(f"state is that of another tree than params: {error}") from None
        # A schedule is read at the number of completed updates: at 0 in the first. The new count is
        # the t of bias corrections. It stays at the largest int32 instead of wrapping around.
        step_size, count = value_at(learning_rate, state.count), optax.safe_increment(state.count)
        rows, read = [], []
        for index, (path, param, grad, facts, *old) in enumerate(
            zip(
                parameters.leaf_paths(params),
                jax.tree.leaves(params),
                grads,
                jax.tree.leaves(parameters.resolve(params, rules)),
                *buffers,
                strict=True,
            )
        ):
            dtype, real = trust_ratio.compute_dtype(param), trust_ratio.real_dtype(param)
            # The dtype is the parameter's, widened, whatever that of the gradient.
            grad, weights = grad.astype(dtype), jnp.asarray(param, dtype)
            if scale is not None:
                grad = grad * scale.astype(real)
            rate = jnp.asarray(step_size, real)
            if facts.rate_factor != 1.0:
                rate = rate * facts.rate_factor
            split = splits.split_of(axis_name, path, weights.shape, facts)
            leaf = Leaf(grad, weights, facts, rate, state.count, index, count, path, split)
            update, new, ratio = step_leaf(leaf, *old)
            # Of all arrays of a step only the update is narrowed; buffers keep their dtypes.
            rows.append((update.astype(jnp.result_type(param)), *new))
            if collect:
                read.append(
                    trust_ratio.leaf_readings(ratio, update, weights, facts, split.axis_name)
                )
        steps, *new_buffers = columns(treedef, rows, 1 + num_buffers)
        readings: Readings | None = None
        if collect:
            readings = trust_ratio.readings_of(treedef, read)
        return steps, state_type._make((count, *new_buffers, *((readings,) if reads else ())))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def value_at(value: optax.ScalarOrSchedule, completed: jax.Array) -> Any:
    """The value at an update of a hyper-parameter that may be a schedule."""
    return value(completed) if callable(value) else value


def decay_at(
    weight_decay: optax.ScalarOrSchedule, facts: ParameterFacts, completed: jax.Array, dtype: Any
) -> jax.Array:
    """A leaf's weight decay at an update: the number or the schedule's, times its factor."""
    decay = jnp.asarray(value_at(weight_decay, completed), dtype)
    return decay if facts.decay_factor == 1.0 else decay * facts.decay_factor


def zeros_like(param: jax.Array, dtype: Any = None) -> jax.Array:
    """Zeros for a buffer of a leaf, placed as it is; by default in the dtype of its arithmetic.

    A complex leaf has complex64 at least, as nothing narrower is complex.
    """
    if dtype is not None and jnp.iscomplexobj(param):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    return jnp.zeros_like(param, dtype=dtype or trust_ratio.compute_dtype(param))


def zero_squares(param: jax.Array, dtype: Any = None) -> jax.Array:
    """Zeros for second moments: as `zeros_like`, but real."""
    return jnp.zeros_like(param, dtype=dtype or trust_ratio.real_dtype(param))


def widen(tree: Any) -> Any:
    """Casts leaves to the dtypes of their arithmetic: narrower ones become float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, trust_ratio.compute_dtype(x)), tree)


def one_minus_power(base: float | jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
    """1 - base ** count without cancellation: at b2 = 0.999 the plain form is off by 2e-5."""
    log: jax.Array | np.ndarray
    # `optax.inject_hyperparams` passes arrays. A Python number has its logarithm taken in float64,
    # before it is rounded to `dtype`.
    if isinstance(base, jax.Array):
        log = jnp.log(base.astype(dtype))
    else:
        # At a base of 0, expm1(-inf) is -1, and the result 1.
        log = np.asarray(math.log(base) if base else -math.inf, dtype)
    return _one_minus_exp(log, count)


@jax.jit  # so that it is traced once and not for every leaf
def _one_minus_exp(log: jax.Array | np.ndarray, count: jax.Array) -> jax.Array:
    return -jnp.expm1(log * count.astype(log.dtype))
