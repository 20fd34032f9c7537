"""Links of chains under a table of facts: decay, rate factors, and float32 for narrow leaves.

They stand in `optax.chain` beside Optax's own links; the baselines here are built of both.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters
from lamb_tpu.optim.parameters import Rules


def check_numbers(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    below_one: Mapping[str, Any] | None = None,
    **at_least_zero: Any,
) -> None:
    """Raises ValueError for what Optax lets through: b1 of 1.5, a negative learning rate."""
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        checks.check_schedule(name, value)
    for name, value in (below_one or {}).items():
        checks.check_range(name, value, upper=1.0)
    for name, value in at_least_zero.items():
        checks.check_range(name, value)


def add_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, rules: Rules = parameters.DEFAULT_RULES
) -> optax.GradientTransformationExtraArgs:
    """Adds to each leaf that decays its weights times the weight decay and its decay factor.

    >>> tx = add_decayed_weights(0.1, rules='no_bias_no_norm')
    >>> params = {'kernel': jnp.array([3., 4.]), 'bias': jnp.ones(2)}
    >>> updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    >>> print(updates['kernel'], updates['bias'])
    [0.3 0.4] [0. 0.]

    Args:
      weight_decay: a number, or a schedule of the count of completed updates.
      rules: which leaves decay, see `parameters.resolve`.

    Returns:
      A transform whose `update` needs `params`. Its state is that of
      `optax.add_decayed_weights` with a mask.

    Raises:
      ValueError: a weight decay below 0, or rules that are not rules.
    """
    checks.check_schedule("weight_decay", weight_decay)
    parameters.check_rules(rules)

    def decays(tree: Any) -> Any:
        return jax.tree.map(lambda facts: facts.decay, parameters.resolve(tree, rules))

    # The mask is a function, so that the tree which comes in decides, as in `optax.partition`.
    added = optax.with_extra_args_support(optax.add_decayed_weights(weight_decay, mask=decays))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        # Optax adds the decay times what it takes for the parameters, so the factors go there.
        return added.update(updates, state, _times("decay_factor", params, rules), **extra)

    return optax.GradientTransformationExtraArgs(added.init, update_fn)


def scale_by_rate_factors(rules: Rules) -> optax.GradientTransformation:
    """Multiplies each leaf's update by its rate factor: a link beside the learning rate.

    >>> tx = optax.chain(optax.sgd(1.0), scale_by_rate_factors([('', {'rate_factor': 0.5})]))
    >>> print(tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0])
    [-0.5 -0.5]

    Args:
      rules: see `parameters.resolve`.

    Raises:
      ValueError: rules that are not rules.
    """
    parameters.check_rules(rules)
    return optax.stateless(lambda updates, _: _times("rate_factor", updates, rules))


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on float32 copies of narrower leaves, so that its moments are float32.

    Around a chain it also keeps what passes between the links in float32; the last updates are
    rounded to the parameters' dtypes. The state is that of `inner`.

    Args:
      inner: any transform.

    Raises:
      ValueError: `inner` is no transform.
    """
    checks.check_transform("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        checks.check_arrays("params", params)
        # Optax mixes integers and floats, as in b1**count, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(leafwise.widen(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        wide = leafwise.widen(params)
        try:
            with jax.numpy_dtype_promotion("standard"):
                updates, state = inner.update(leafwise.widen(updates), state, wide, **extra)
        except (AttributeError, TypeError, ValueError) as error:
            # A state of the right structure is not the cause: the error of `inner` has its own
            # words.
            expected = jax.tree.structure(jax.eval_shape(init_fn, params))
            if jax.tree.structure(state) == expected:
                raise
            raise ValueError(
                f"state is not the one that this transform's init made: {checks.short(state)}"
            ) from error
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def under_rules(
    inner: optax.GradientTransformation, rules: Rules
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner`, which ends with the learning rate, in float32 and with rate factors.

    The state is that of `inner`, as it is in checkpoints of runs from before there were factors.
    """
    inner = optax.with_extra_args_support(inner)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        # The factors come last and need no state. All that the rate multiplies, decoupled decay
        # too, is scaled by them; moments are not.
        updates, state = inner.update(updates, state, params, **extra)
        return _times("rate_factor", updates, rules), state

    return in_float32(optax.GradientTransformationExtraArgs(inner.init, update_fn))


def refuse_leaves(
    tree: Any,
    rules: Rules,
    refused: Callable[[str, Any, parameters.ParameterFacts], bool],
    message: str,
) -> None:
    """Raises ValueError with the message, its {path} filled in, for the first refused leaf.

    Args:
      tree: parameters or their updates.
      rules: see `parameters.resolve`.
      refused: a function of a leaf's path, the leaf and its facts.
      message: with {path!r}.
    """
    for path, leaf, facts in zip(
        parameters.leaf_paths(tree),
        jax.tree.leaves(tree),
        jax.tree.leaves(parameters.resolve(tree, rules)),
        strict=True,
    ):
        if refused(path, leaf, facts):
            raise ValueError(message.format(path=path))


def _times(factor: str, tree: Any, rules: Rules) -> Any:
    def times(leaf: jax.Array, facts: parameters.ParameterFacts) -> jax.Array:
        value = getattr(facts, factor)
        return leaf if value == 1.0 else value * leaf

    return jax.tree.map(times, tree, parameters.resolve(tree, rules))
