"""Schedule-free AdamW, built on Optax's `schedule_free`, and its weights for evaluation."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free

from lamb_tpu.optim import checks, parameters
from lamb_tpu.optim.chains import add_decayed_weights, in_float32, under_rules
from lamb_tpu.optim.parameters import Rules


def schedule_free_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_lr_power: float = 2.0,
    rules: Rules = parameters.DEFAULT_RULES,
    weight_step_power: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW without a decay of the learning rate; averages its iterates instead.

    The trained parameters y, at which gradients are computed, lie between the iterate z of AdamW
    and the average x of all iterates: y = (1 - b1) z + b1 x. **Evaluate at x**, which
    `evaluation_params(opt_state, params)` returns. The trainer and the commands that read
    checkpoints do this. Use a warm-up, but no decay of the rate. The running averages of BatchNorm
    are those of y instead of x; the authors recompute these averages at x before an evaluation.

    Update t, counted from 1, has the weight :math:`t^r m_t^p` in the average x, as in the authors'
    code: r is `weight_step_power`, p is `weight_lr_power`, and :math:`m_t` is the largest rate of
    updates 1 to t. `optax.contrib.schedule_free_adamw` has r = 0 and uses the rate of the next update,
    which differs during a warm-up.

    Args:
      learning_rate: `lamb_tpu.optim` describes all arguments that are not listed here.
      b1: the weight of the average x in y, above 0 and below 1.
      b2: the decay of the second moments.
      eps: added to the root of the second moments.
      weight_decay: applied to y, multiplied by the learning rate.
      weight_lr_power: p above. If p and r are both 0, all updates have the same weight.
      weight_step_power: r above. If r is above 0, later updates have more weight.

    References:
      Defazio et al., The Road Less Scheduled, arXiv:2405.15682.
    """
    checks.checked(schedule_free_adamw, locals())
    if not isinstance(b1, jax.core.Tracer) and b1 == 0:
        raise ValueError("b1=0 must be above 0, or the average would be lost")
    rate = learning_rate
    if callable(learning_rate):

        def rate(count: jax.Array) -> jax.Array:
            return learning_rate(count - 1)  # Optax's `schedule_free` counts updates from 1

    # AdamW without a first moment: the average replaces its momentum.
    base = optax.chain(
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        add_decayed_weights(weight_decay, rules),
        optax.scale_by_learning_rate(learning_rate),
    )
    # Rate factors scale the step of z, so apply them inside `schedule_free`. Optax stores z in the
    # parameters' dtypes, and b1 and the sum of weights in the narrowest of these dtypes. So wrap
    # the result in `in_float32`.
    inner = under_rules(base, rules)
    averaged = schedule_free(inner, rate, b1, weight_lr_power)
    if isinstance(weight_step_power, jax.core.Tracer) or weight_step_power != 0:

        def update_fn(
            updates: optax.Updates,
            state: ScheduleFreeState,
            params: optax.Params = None,
            **extra: Any,
        ) -> tuple[optax.Updates, ScheduleFreeState]:
            # Optax computes the weight as a power of the largest rate. Pass the weight itself as
            # the "rate", with the power 1, and track the largest rate here.
            now = jnp.asarray(rate(state.step_count) if callable(rate) else rate)
            largest = jnp.maximum(state.max_lr, now.astype(state.max_lr.dtype))
            step = state.step_count.astype(largest.dtype)
            weight = step**weight_step_power * largest**weight_lr_power
            weighted = schedule_free(inner, weight, b1, weight_lr_power=1.0)
            unweighted = state._replace(max_lr=jnp.zeros_like(largest))
            updates, state = weighted.update(updates, unweighted, params, **extra)
            return updates, state._replace(max_lr=largest)

        averaged = optax.GradientTransformationExtraArgs(averaged.init, update_fn)
    return in_float32(averaged)


def keeps_evaluation_params(opt_state: optax.OptState) -> bool:
    """Returns whether a state (of arrays, or of their shapes) has separate weights for evaluation."""
    return bool(_averaging(opt_state))


def evaluation_params(opt_state: optax.OptState, params: optax.Params) -> Any:
    """Returns the parameters to evaluate, which for `schedule_free_adamw` are the averages x.

    >>> import jax.numpy as jnp
    >>> tx, params = schedule_free_adamw(0.1), {'w': jnp.ones(2)}
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     updates, state = tx.update({'w': jnp.ones(2)}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> average = evaluation_params(state, params)
    >>> print(params['w'][0].round(4), average['w'][0].round(4))  # 1 - the mean of .1, .2 and .3
    0.79 0.8

    Args:
      opt_state: the state of any transform, which may contain `schedule_free_adamw` at any depth.
        It may also be a restored checkpoint of such a state, with dicts in place of named tuples.
      params: the trained parameters, or a tree that has some of them under the same paths.

    Returns:
      A tree like `params`, in the same dtypes. Parameters for which the state has averages are
      replaced by these; the others do not change.
    """
    checks.check_arrays("params", params)
    known = {}
    # z is a tree with the paths of the parameters; inside `optax.partition` it has only some of
    # them.
    for state in _averaging(opt_state):
        fields = state if isinstance(state, Mapping) else state._asdict()
        for path, point in zip(
            parameters.leaf_paths(fields["z"]), jax.tree.leaves(fields["z"]), strict=True
        ):
            known[path] = point, fields["b1"]

    def average(path: str, param: jax.Array) -> jax.Array:
        if path not in known:
            return param
        point, b1 = known[path]
        # x is not stored: solve y = (1 - b1) z + b1 x.
        return ((param.astype(point.dtype) - (1.0 - b1) * point) / b1).astype(param.dtype)

    leaves, treedef = jax.tree.flatten(params)
    paths = parameters.leaf_paths(params)
    return treedef.unflatten(map(average, paths, leaves))


def _averaging(opt_state: optax.OptState) -> list[Any]:
    checks.check_opt_state(opt_state)

    def is_one(node: Any) -> bool:
        # A restored checkpoint has a dict with the same keys in place of the named tuple.
        fields = set(ScheduleFreeState._fields)
        return isinstance(node, ScheduleFreeState) or (
            isinstance(node, Mapping) and set(node) == fields
        )

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]
