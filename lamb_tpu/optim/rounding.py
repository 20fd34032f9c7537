r"""Stochastic rounding, which lets bfloat16 weights accumulate very small updates.

A bfloat16 number has 8 significant bits. With rounding to nearest, a weight of 1 loses every update
below 1/256, so weights stop changing late in training. Stochastic rounding rounds up or down at
random, with probabilities that make the mean exact. The weights then follow float32 weights on
average, without a stored float32 copy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.trust_ratio import AxisName, MeshAxes


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    inner_state: optax.OptState  # the state of `inner`


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Runs `inner` on float32 copies of leaves; rounds new weights to bfloat16 stochastically.

    For a bfloat16 weight :math:`w`, the float32 update :math:`u` of `inner`, and the neighbours
    :math:`a \le w + u \le b` in bfloat16,

    .. math:: w' = b \text{ with probability } \frac{w + u - a}{b - a}, \text{ else } a

    The mean of :math:`w'` is :math:`w + u`, and a sum that bfloat16 can represent does not change.
    The transform returns :math:`w' - w` in float32, so that `optax.apply_updates` computes
    :math:`w'` exactly. No other transform may change this update, so `stochastic_rounding` must be
    the outermost or last transform. Sums that are not finite are rounded as usual. If a leaf is
    float32 or wider, the update of `inner` does not change.

    The random bits depend on `seed`, the count of updates, the leaf's index in the tree and, inside
    `shard_map` or `pmap`, the device's index along the leaf's mesh axes in `axis_name`. Different
    shards therefore draw different bits, and all replicas of a weight are rounded alike. Under
    `jit` the bits do not depend on shardings.

    >>> tx = stochastic_rounding(optax.sgd(1.0))
    >>> params = jnp.ones(1000, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.full(1000, -1e-3), tx.init(params), params)
    >>> rounded = optax.apply_updates(params, updates)
    >>> values, counts = jnp.unique(rounded, return_counts=True)
    >>> print(values.astype(jnp.float32), rounded.dtype)  # a fraction of 0.001 * 128 is rounded up
    [1.        1.0078125] bfloat16
    >>> print(bool(100 < counts[1] < 156))
    True

    Args:
      inner: any transform. `optax.inject_hyperparams`, `apply_if_finite` and similar wrappers must
        be part of `inner`.
      seed: the seed of the random bits, at least 0.
      axis_name: see `lamb_tpu.optim`. Pass `axis_name` to `inner` too.

    Returns:
      A transform whose `update` needs `params`; updates are float32 for bfloat16 leaves.

    Raises:
      ValueError: the seed is invalid; from `init`, a parameter is float16 or another narrow dtype
        that is not bfloat16.
    """
    checks.checked(stochastic_rounding, locals())
    checks.check_transform("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        checks.check_arrays("params", params)
        for path, leaf in zip(parameters.leaf_paths(params), jax.tree.leaves(params), strict=True):
            dtype = jnp.result_type(leaf)
            if dtype.itemsize < 4 and dtype != jnp.bfloat16:
                raise ValueError(
                    f"the parameter {path!r} is {dtype}, but must be bfloat16, float32 or float64"
                )
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(leafwise.widen(params)))

    def update_fn(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params = None,
        **extra: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        checks.gradient_leaves(updates, params)
        checks.check_state(state, StochasticRoundingState)
        wide = leafwise.widen(params)
        updates, inner_state = inner.update(
            leafwise.widen(updates), state.inner_state, wide, **extra
        )
        # The key is derived from the count instead of stored, so a resumed run draws the same bits.
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        treedef = jax.tree.structure(params)
        rounded = [
            _change(_leaf_key(key, index, path, axis_name), weights, update)
            if jnp.result_type(param) == jnp.bfloat16
            else update
            for index, (path, param, weights, update) in enumerate(
                zip(
                    parameters.leaf_paths(params),
                    jax.tree.leaves(params),
                    jax.tree.leaves(wide),
                    treedef.flatten_up_to(updates),
                    strict=True,
                )
            )
        ]
        count = optax.safe_increment(state.count)
        return treedef.unflatten(rounded), StochasticRoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _leaf_key(key: jax.Array, index: int, path: str, axis_name: AxisName) -> jax.Array:
    # Fold in this device's index along the leaf's mesh axes, or two shards of the leaf would draw
    # the same bits. Replicas of a shard differ only in their index along other mesh axes, so they
    # draw the same bits and stay equal.
    def of_shard(key: jax.Array, axes: MeshAxes) -> jax.Array:
        return jax.random.fold_in(key, jax.lax.axis_index(axes))

    axes = trust_ratio.axes_of(axis_name, path)
    return trust_ratio.over(of_shard, jax.random.fold_in(key, index), axes)


def _change(key: jax.Array, weights: jax.Array, update: jax.Array) -> jax.Array:
    # The difference is exact, or its error is far below half a unit in the last place of the new
    # weight. If weight and update nearly cancel, their sum has so few bits that it needs no rounding.
    rounded = round_to_bfloat16(key, weights + update)
    # If a weight stays infinite, the difference must be 0, but inf - inf would be NaN.
    return jnp.where(rounded == weights, 0.0, rounded - weights)


def round_to_bfloat16(key: jax.Array, values: jax.Array) -> jax.Array:
    """Rounds each float32 value to one of its two neighbours in bfloat16, so that the mean is exact.

    A bfloat16 number is the upper half of the bits of a float32 number. Uniform noise that is added
    to the lower half carries into the upper half with a probability proportional to the lower half.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    # Do not change NaN and infinity: the sum of bits and the mask could turn NaN into 0 or
    # infinity.
    return jnp.where(jnp.isfinite(values), rounded, values)
