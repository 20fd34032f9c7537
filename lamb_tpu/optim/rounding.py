r"""Stochastic rounding, so that bfloat16 weights keep updates smaller than half their last digit.

A bfloat16 number has 8 significant bits. Rounded to nearest, a weight of 1 loses every update below
1/256, so that late in training weights stand still. Rounded up or down at random, with the
probabilities that make the mean exact, they follow the float32 weights on average, and no float32
copy of them is stored.
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
    inner_state: optax.OptState


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Runs `inner` on float32 copies, and rounds the new weights to bfloat16 stochastically.

    For a bfloat16 weight :math:`w` and the update :math:`u` that `inner` gives in float32, between
    the neighbours :math:`a \le w + u \le b` in bfloat16,

    .. math:: w' = b \text{ with probability } \frac{w + u - a}{b - a}, \text{ else } a

    so that the mean of :math:`w'` is :math:`w + u`, and a sum that bfloat16 can hold is left alone.
    The update returned is :math:`w' - w` in float32, with which `optax.apply_updates` gives
    :math:`w'` exactly; nothing may change it in between, so this is the outermost or last
    transform. A sum that is not finite is rounded as usual. Leaves of float32 or wider take the
    update of `inner` as it is.

    The random bits depend on `seed`, the count of updates, the leaf's place in the tree and, inside
    `shard_map` or `pmap`, the device's place along the axes that `axis_name` gives for the leaf:
    shards draw bits of their own, and all replicas of a weight round alike. Under `jit` they are
    the same whatever the shardings.

    >>> tx = stochastic_rounding(optax.sgd(1.0))
    >>> params = jnp.ones(1000, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.full(1000, -1e-3), tx.init(params), params)
    >>> rounded = optax.apply_updates(params, updates)
    >>> values, counts = jnp.unique(rounded, return_counts=True)
    >>> print(values.astype(jnp.float32), rounded.dtype)  # the second for 0.001 * 128 of them
    [1.        1.0078125] bfloat16
    >>> print(bool(100 < counts[1] < 156))
    True

    Args:
      inner: any transform. Give `optax.inject_hyperparams`, `apply_if_finite` and
        the like inside it.
      seed: of the random bits, at least 0.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`. To be given to `inner` too.

    Returns:
      A transform whose `update` needs `params`; updates are float32 for bfloat16 leaves.

    Raises:
      ValueError: a seed that is none; from `init`, parameters of another narrow dtype.
    """
    checks.check_transform("inner", inner)
    checks.check_whole("seed", seed)
    checks.check_axis_name(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        checks.check_arrays("params", params)
        for path, leaf in zip(parameters.leaf_paths(params), jax.tree.leaves(params), strict=True):
            dtype = jnp.result_type(leaf)
            if dtype.itemsize < 4 and dtype != jnp.bfloat16:
                raise ValueError(
                    f"stochastic_rounding is for bfloat16: the parameter {path!r} is {dtype}"
                )
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(leafwise.widen(params)))

    def update_fn(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        checks.gradient_leaves(updates, params)
        checks.check_state(state, StochasticRoundingState)
        wide = leafwise.widen(params)
        updates, inner_state = inner.update(
            leafwise.widen(updates), state.inner_state, wide, **extra_args
        )
        # Made from the count and not kept in the state: a resumed run draws the same bits.
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        treedef = jax.tree.structure(params)
        rounded = [
            change(leaf_key(key, index, path), weights, update)
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

    def leaf_key(key: jax.Array, index: int, path: str) -> jax.Array:
        def of_shard(key: jax.Array, axes: MeshAxes) -> jax.Array:
            return jax.random.fold_in(key, jax.lax.axis_index(axes))

        # Without the place on the mesh two shards of a leaf would share their bits. Replicas have
        # no such axes, so they draw the same bits and stay equal.
        key = jax.random.fold_in(key, index)
        return trust_ratio.over(of_shard, key, trust_ratio.axes_of(axis_name, path))

    def change(key: jax.Array, weights: jax.Array, update: jax.Array) -> jax.Array:
        # The difference is exact, or off by far less than half a digit of the new weight: where
        # the sum nearly cancels it has so few bits that it is not rounded at all.
        rounded = round_to_bfloat16(key, weights + update)
        # An infinite weight that stays has the difference 0; inf - inf would be NaN.
        return jnp.where(rounded == weights, 0.0, rounded - weights)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def round_to_bfloat16(key: jax.Array, values: jax.Array) -> jax.Array:
    """Rounds each float32 value to one of its two neighbours in bfloat16, exact in the mean.

    A bfloat16 number is the upper half of a float32 one. Noise that is uniform over the lower half
    carries into the upper as often as the lower is large.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    # Carries and the mask would turn some NaNs into zeros or infinities.
    return jnp.where(jnp.isfinite(values), rounded, values)
