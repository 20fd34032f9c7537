"""Schedule-free AdamW, Optax's own, and the weights at which it is evaluated."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free

from lamb_tpu.optim import checks, parameters
from lamb_tpu.optim.chains import add_decayed_weights, check_numbers, in_float32, under_rules
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
    """AdamW without a schedule: steps from one point, gradients near their average.

    The parameters that are trained, y, lie between the point z at which AdamW has arrived and the
    average x of all such points: y = (1 - b1) z + b1 x. **Evaluate at x**, which is
    `evaluation_params(opt_state, params)`; the trainer, and whatever reads weights from its
    checkpoints, does. Give a warm-up and no decay of the rate. Running averages of BatchNorm are
    those of y and not of x; the authors compute them anew at x before an evaluation.

    Update t, counted from 1, has the weight :math:`t^r m_t^p` in the average, as in the authors'
    code: r is `weight_step_power`, p is `weight_lr_power`, and m_t is the largest rate up to this
    update. `optax.contrib.schedule_free_adamw` has r = 0 and takes the next update's rate, which
    differs in a warm-up.

    Args:
      learning_rate: a number, or a schedule of the count of completed updates.
      b1: how near y is to the average, above 0 and below 1.
      b2: of the second moments.
      eps: added to their root.
      weight_decay: of y, times the learning rate; a number, or a schedule.
      weight_lr_power: p above; if both powers are 0, all updates count alike.
      rules: which leaves decay, see `parameters.resolve`.
      weight_step_power: r above, which the authors call `r`; above 0, later updates count more.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      Defazio et al., The Road Less Scheduled, arXiv:2405.15682.
    """
    check_numbers(
        learning_rate,
        weight_decay,
        {"b1": b1, "b2": b2},
        eps=eps,
        weight_lr_power=weight_lr_power,
        weight_step_power=weight_step_power,
    )
    if not isinstance(b1, jax.core.Tracer) and b1 == 0:
        raise ValueError("b1 must be above 0, or the average is lost, not 0")
    rate = learning_rate
    if callable(learning_rate):

        def rate(count: jax.Array) -> jax.Array:
            return learning_rate(count - 1)  # Optax counts from 1 here

    # AdamW without a first moment: the average takes the place of its momentum.
    base = optax.chain(
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        add_decayed_weights(weight_decay, rules),
        optax.scale_by_learning_rate(learning_rate),
    )
    # The factors of rules belong inside, where z takes its step. Optax keeps z in the parameters'
    # dtypes, and b1 and the sum of weights in the narrowest of them, hence float32 around it all.
    inner = under_rules(base, rules)
    averaged = schedule_free(inner, rate, b1, weight_lr_power)
    if isinstance(weight_step_power, jax.core.Tracer) or weight_step_power != 0:

        def update_fn(
            updates: optax.Updates,
            state: ScheduleFreeState,
            params: optax.Params = None,
            **extra: Any,
        ) -> tuple[optax.Updates, ScheduleFreeState]:
            # Optax's weight is the largest rate to a power. Here the "rate" is the weight itself,
            # the power is 1, and the largest rate is kept by this function.
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


def keeps_evaluation_params(opt_state: Any) -> bool:
    """Returns True for a state, or its shapes, that gives weights of its own to evaluate."""
    return bool(_averaging(opt_state))


def evaluation_params(opt_state: Any, params: Any) -> Any:
    """The parameters at which to evaluate: of `schedule_free_adamw` the averages x.

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
      opt_state: of any transform, with `schedule_free_adamw` anywhere in it or not; or what a
        checkpoint of one gives back, in which named tuples are dicts.
      params: the parameters that go with it, or some of them.

    Returns:
      The same tree, with the averages where the state has them, in the parameters' dtypes.
    """
    checks.check_arrays("params", params)
    known = {}
    # Paths in z are those of the parameters: inside `optax.partition` of those that the state has.
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
        # y = (1 - b1) z + b1 x, solved for x, which is not stored.
        return ((param.astype(point.dtype) - (1.0 - b1) * point) / b1).astype(param.dtype)

    leaves, treedef = jax.tree.flatten(params)
    paths = parameters.leaf_paths(params)
    return treedef.unflatten(map(average, paths, leaves))


def _averaging(opt_state: Any) -> list[Any]:
    checks.check_opt_state(opt_state)

    def is_one(node: Any) -> bool:
        # A checkpoint gives back a dict in place of a named tuple: known by its keys.
        fields = set(ScheduleFreeState._fields)
        return isinstance(node, ScheduleFreeState) or (
            isinstance(node, Mapping) and set(node) == fields
        )

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]
