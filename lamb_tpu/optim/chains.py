"""Transforms for `optax.chain`: weight decay and rate factors by rules, and float32 arithmetic.

These transforms can be combined with Optax's, as in `baselines`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters
from lamb_tpu.optim.parameters import Rules


def add_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, rules: Rules = parameters.DEFAULT_RULES
) -> optax.GradientTransformationExtraArgs:
    """Adds weight decay, times each leaf's decay factor, to the updates of leaves that decay.

    >>> tx = add_decayed_weights(0.1, rules='no_bias_no_norm')
    >>> params = {'kernel': jnp.array([3., 4.]), 'bias': jnp.ones(2)}
    >>> updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    >>> print(updates['kernel'], updates['bias'])
    [0.3 0.4] [0. 0.]

    `lamb_tpu.optim` describes both arguments. `update` needs `params`. The state has the form of the
    state of `optax.add_decayed_weights` with a mask.
    """
    checks.check_schedule("weight_decay", weight_decay)
    parameters.check_rules(rules)

    def decays(tree: parameters.PyTree) -> parameters.PyTree:
        return jax.tree.map(lambda metadata: metadata.decay, parameters.resolve(tree, rules))

    # The mask is a function because `optax.partition` passes only some of the leaves.
    added = optax.with_extra_args_support(optax.add_decayed_weights(weight_decay, mask=decays))

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        # Optax multiplies the decay by these parameters, so scaling them applies the factors.
        return added.update(updates, state, _times("decay_factor", params, rules), **extra)

    return optax.GradientTransformationExtraArgs(added.init, update_fn)


def scale_by_rate_factors(rules: Rules) -> optax.GradientTransformation:
    """Multiplies each leaf's update by the leaf's rate factor; place it beside the learning-rate transform.

    >>> tx = optax.chain(optax.sgd(1.0), scale_by_rate_factors([('', {'rate_factor': 0.5})]))
    >>> print(tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0])
    [-0.5 -0.5]
    """
    parameters.check_rules(rules)
    return optax.stateless(lambda updates, _: _times("rate_factor", updates, rules))


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on float32 copies of narrower leaves, so that its moments are float32.

    If `inner` is a chain, all values between its transforms are float32 too. Only the final updates
    are rounded to the parameters' dtypes. The state is `inner`'s state.
    """
    checks.check_transform("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        checks.check_arrays("params", params)
        # Optax mixes integers and floats, for example b1**count, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(leafwise.widen(params))

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        wide = leafwise.widen(params)
        try:
            with jax.numpy_dtype_promotion("standard"):
                updates, state = inner.update(leafwise.widen(updates), state, wide, **extra)
        except (AttributeError, TypeError, ValueError) as error:
            # If the state has the right structure, `inner` failed for another reason.
            expected = jax.tree.structure(jax.eval_shape(init_fn, params))
            if jax.tree.structure(state) == expected:
                raise
            raise ValueError(
                f"state={checks.short(state)} must be the state from this transform's init"
            ) from error
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def under_rules(
    inner: optax.GradientTransformation, rules: Rules
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` in float32 and applies rate factors; `inner` must end with the learning rate.

    The state is `inner`'s state, so checkpoints from before rate factors existed still load.
    """
    inner = optax.with_extra_args_support(inner)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        # Applied last, the factors scale everything that the rate multiplies, including decoupled
        # decay, but not the moments.
        updates, state = inner.update(updates, state, params, **extra)
        return _times("rate_factor", updates, rules), state

    return in_float32(optax.GradientTransformationExtraArgs(inner.init, update_fn))


def reject_leaves(
    tree: parameters.PyTree,
    rules: Rules,
    problem: Callable[[str, Any, parameters.ParameterMetadata], str | None],
) -> None:
    """Raises ValueError with the first message that `problem(path, leaf, metadata)` returns."""
    for row in parameters.rows(tree, rules):
        message = problem(*row)
        if message is not None:
            raise ValueError(message)


def _times(factor: str, tree: parameters.PyTree, rules: Rules) -> parameters.PyTree:
    def times(leaf: jax.Array, metadata: parameters.ParameterMetadata) -> jax.Array:
        value = getattr(metadata, factor)
        return leaf if value == 1.0 else value * leaf

    return jax.tree.map(times, tree, parameters.resolve(tree, rules))
