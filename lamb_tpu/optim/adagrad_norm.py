r"""AdaGrad-Norm: SGD whose one step length shrinks with the gradients that it has seen."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, clipping, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Readings


class AdagradNormState(NamedTuple):
    """State of `adagrad_norm`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    accumulator: Any  # the squared norms summed up: (), or with `per_layer` a tree as `leaf_norm`'s
    readings: Readings | None


def adagrad_norm(
    learning_rate: optax.ScalarOrSchedule,
    initial_norm: float = 0.1,
    per_layer: bool = False,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGrad-Norm, the form of AdaGrad with one number for all parameters.

    .. math::
      b_t^2 = b_{t-1}^2 + \|d_t\|^2, \qquad w_t = w_{t-1} - \frac{\eta_{t-1}}{b_t} d_t, \qquad
      d_t = g_t + \lambda w_{t-1}

    with the l2 norm of all gradients together. While :math:`b_t` is 0 no step is taken. The state
    is that number, in float32 (float64 where a leaf is float64), and arithmetic is in the same.
    There is one step length, so whether a leaf adapts changes nothing.

    >>> import jax.numpy as jnp
    >>> params = {'a': jnp.array([3., 0.]), 'b': jnp.array(4.)}
    >>> tx = adagrad_norm(1.0, initial_norm=0.0)
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> print(updates['a'], updates['b'], state.accumulator)  # 3 / 5, 4 / 5, 5 ** 2
    [-0.6 -0. ] -0.8 25.0
    >>> tx = adagrad_norm(1.0, initial_norm=0.0, per_layer=True)
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> print(updates['a'], updates['b'])
    [-1. -0.] -1.0

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates.
      initial_norm: :math:`b_0`, at least 0; 0.1, the root of the initial value of 0.01 in the code
        of AdAdaGrad's authors, which keeps one number for each row of a matrix.
      per_layer: a number :math:`b` for each layer, from the gradients of that layer alone.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates.
      rules: which leaves decay, which axes stack layers, see `parameters.resolve`.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`. Without `per_layer` the layers of a
        stack must not be split.
      collect: keep each layer's ratio and norms in the state, see `readings.read`. The ratio is
        what the gradient is multiplied by, :math:`1 / b_t`.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range or no choice, naming it.

    References:
      Ward, Wu and Bottou, AdaGrad stepsizes: Sharp convergence over nonconvex landscapes,
      arXiv:1806.01811.
      Lau, Liu and Kolar, AdAdaGrad, arXiv:2402.11215, which adapts the batch size for it.
    """
    checks.check_range("initial_norm", initial_norm)
    checks.check_flag("per_layer", per_layer)
    checks.check_schedule("weight_decay", weight_decay)

    def decayed(
        grad: jax.Array, weights: jax.Array, facts: ParameterFacts, completed: jax.Array
    ) -> jax.Array:
        if not facts.decay:
            return grad
        real = trust_ratio.real_dtype(grad)
        return grad + leafwise.decay_at(weight_decay, facts, completed, real) * weights

    def init_leaf(param: jax.Array, facts: ParameterFacts, split: Split) -> tuple[Any, ...]:
        # The norm gives its shape, and on a mesh its place.
        norm = trust_ratio.leaf_norm(param, facts, axis_name=split.axis_name)
        return (jnp.full_like(norm, initial_norm**2),)

    def step_leaf(leaf: Leaf, total: jax.Array) -> Step:
        grad = decayed(leaf.grad, leaf.weights, leaf.facts, leaf.completed)
        if per_layer:
            newest = trust_ratio.leaf_norm(grad, leaf.facts, axis_name=leaf.axis_name)
            total = (total + newest * newest).astype(total.dtype)
        still = total == 0  # and not where it is NaN, which has to show
        ratio = jnp.where(still, 0.0, 1 / jnp.sqrt(jnp.where(still, 1.0, total)))
        return -leaf.rate * (ratio * grad), (total,), ratio

    layers = leafwise.transform(
        AdagradNormState,
        init_leaf,
        step_leaf,
        learning_rate,
        rules,
        axis_name=axis_name,
        collect=collect,
    )
    if per_layer:
        return layers

    # One number for the model: around the walk over leaves, which has a buffer for each. The number
    # is the only state; before an update it is put into every leaf's buffer.
    def init_fn(params: optax.Params) -> AdagradNormState:
        state = layers.init(params)
        # The widest of the leaves, and float32 for a tree without any.
        dtype = jnp.result_type(jnp.float32, *map(trust_ratio.real_dtype, jax.tree.leaves(params)))
        return state._replace(accumulator=jnp.asarray(initial_norm**2, dtype))

    def update_fn(
        updates: optax.Updates,
        state: AdagradNormState,
        params: optax.Params = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AdagradNormState]:
        checks.gradient_leaves(updates, params)
        checks.check_state(state, AdagradNormState)
        facts = parameters.resolve(params, rules)
        grads = jax.tree.map(
            lambda p, g, f: decayed(leafwise.widen(g), leafwise.widen(p), f, state.count),
            params,
            updates,
            facts,
        )
        norm = clipping.global_norm(grads, axis_name).astype(state.accumulator.dtype)
        total = state.accumulator + norm * norm

        # The shape that `leaf_norm` gives: size 1 along all axes that stack no layers.
        def same(param: jax.Array, fact: ParameterFacts) -> jax.Array:
            shape = enumerate(jnp.shape(param))
            return jnp.broadcast_to(total, [n if i in fact.layer_axes else 1 for i, n in shape])

        given = state._replace(accumulator=jax.tree.map(same, params, facts))
        steps, state = layers.update(updates, given, params, **extra_args)
        return steps, state._replace(accumulator=total)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
