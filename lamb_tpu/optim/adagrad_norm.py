r"""AdaGrad-Norm: SGD with a single step length, which shrinks as gradients accumulate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, clipping, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics


class AdagradNormState(NamedTuple):
    """State of `adagrad_norm`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    accumulator: Any  # sum of squared norms: (), or with `per_layer` a tree with a sum per layer
    diagnostics: Diagnostics | None


def adagrad_norm(
    learning_rate: optax.ScalarOrSchedule,
    initial_norm: float = 0.1,
    per_layer: bool = False,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGrad-Norm, the form of AdaGrad with a single step length for all parameters.

    .. math::
      b_t^2 = b_{t-1}^2 + \|d_t\|^2, \qquad w_t = w_{t-1} - \frac{\eta_{t-1}}{b_t} d_t, \qquad
      d_t = g_t + \lambda w_{t-1}

    where :math:`\|d_t\|` is the global l2 norm over all leaves. If :math:`b_t` is 0, the update is
    0. The state is :math:`b_t^2` in float32 (float64 if a leaf is float64). There is no trust
    ratio, so `adapt` of the rules has no effect.

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
      learning_rate: :math:`\eta`. `lamb_tpu.optim` describes all arguments that are not listed
        here.
      initial_norm: :math:`b_0`, at least 0. The default is the square root of 0.01, the initial
        :math:`b^2` in the code of AdAdaGrad's authors. There, each row of a matrix has a separate
        :math:`b^2`.
      per_layer: whether each layer has a separate :math:`b`, computed from the layer's gradients.
      weight_decay: :math:`\lambda`.
      axis_name: without `per_layer`, these mesh axes must not split the layers of a stack.
      collect: the stored ratio is the factor of the gradient, :math:`1 / b_t`.

    References:
      Ward, Wu and Bottou, AdaGrad stepsizes: Sharp convergence over nonconvex landscapes,
      arXiv:1806.01811.
      Lau, Liu and Kolar, AdAdaGrad, arXiv:2402.11215, which adapts the batch size.
    """
    given = checks.checked(adagrad_norm, locals())

    def init_leaf(param: jax.Array, metadata: ParameterMetadata, split: Split) -> tuple[Any, ...]:
        # `leaf_norm` returns an array with the shape and the sharding that the buffer must have.
        norm = trust_ratio.leaf_norm(param, metadata, axis_name=split.axis_name)
        return (jnp.full_like(norm, initial_norm**2),)

    def step_leaf(leaf: Leaf, total: jax.Array) -> Step:
        grad = _decayed(leaf.grad, leaf.weights, leaf.metadata, weight_decay, leaf.completed)
        if per_layer:
            newest = trust_ratio.leaf_norm(grad, leaf.metadata, axis_name=leaf.axis_name)
            total = (total + newest * newest).astype(total.dtype)
        still = total == 0  # False for NaN, which must propagate
        ratio = jnp.where(still, 0.0, 1 / jnp.sqrt(jnp.where(still, 1.0, total)))
        return -leaf.rate * (ratio * grad), (total,), ratio

    layers = leafwise.transform(AdagradNormState, init_leaf, step_leaf, **leafwise.common(given))
    return (
        layers if per_layer else _of_the_model(layers, initial_norm, weight_decay, rules, axis_name)
    )


def _decayed(
    grad: jax.Array,
    weights: jax.Array,
    metadata: ParameterMetadata,
    weight_decay: optax.ScalarOrSchedule,
    completed: jax.Array,
) -> jax.Array:
    if not metadata.decay:
        return grad
    real = trust_ratio.real_dtype(grad)
    return grad + leafwise.decay_at(weight_decay, metadata, completed, real) * weights


def _of_the_model(
    layers: optax.GradientTransformationExtraArgs,
    initial_norm: float,
    weight_decay: optax.ScalarOrSchedule,
    rules: Rules,
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Converts `layers`, which has a buffer per leaf, into a transform whose state is one number.

    Each update copies this number into the buffer of every leaf.
    """

    def init_fn(params: optax.Params) -> AdagradNormState:
        state = layers.init(params)
        # The widest dtype of the leaves, or float32 for a tree without leaves.
        dtype = jnp.result_type(jnp.float32, *map(trust_ratio.real_dtype, jax.tree.leaves(params)))
        return state._replace(accumulator=jnp.asarray(initial_norm**2, dtype))

    def update_fn(
        updates: optax.Updates, state: AdagradNormState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, AdagradNormState]:
        checks.gradient_leaves(updates, params)
        checks.check_state(state, AdagradNormState)
        metadata = parameters.resolve(params, rules)

        def decayed(param: jax.Array, grad: jax.Array, meta: ParameterMetadata) -> jax.Array:
            grad, param = leafwise.widen(grad), leafwise.widen(param)
            return _decayed(grad, param, meta, weight_decay, state.count)

        grads = jax.tree.map(decayed, params, updates, metadata)
        norm = clipping.global_norm(grads, axis_name).astype(state.accumulator.dtype)
        total = state.accumulator + norm * norm

        # As in `leaf_norm`, the buffer has size 1 along all axes that do not stack layers.
        def broadcast(param: jax.Array, meta: ParameterMetadata) -> jax.Array:
            shape = enumerate(jnp.shape(param))
            return jnp.broadcast_to(total, [n if i in meta.layer_axes else 1 for i, n in shape])

        per_leaf = state._replace(accumulator=jax.tree.map(broadcast, params, metadata))
        steps, state = layers.update(updates, per_leaf, params, **extra)
        return steps, state._replace(accumulator=total)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
