r"""LARS in its two published forms: momentum SGD with one step length for each layer.

The forms differ in more than notation: `lars` divides by the norm of the raw gradient, keeps the
learning rate inside the momentum buffer and has a small trust coefficient; `lars_lamb_paper`
divides by the norm of the momentum, into which the decay goes, and has no coefficient. Learning
rates do not carry over from one to the other.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import parameters, trust_ratio
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.trust_ratio import AxisName


class LarsState(NamedTuple):
    """State of `lars` and `lars_lamb_paper`."""

    count: jax.Array  # int32, (): completed updates
    momentum: Any  # the parameters' shapes, float32
    ratios: Any  # None, or a float32 per leaf, shaped by its layer axes: (), or (num_layers,)


def lars(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    coefficient: float = 0.001,
    eps: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    norm: str = "l2",
    zero_ratio: float = 1.0,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformation:
    r"""LARS of 2017, as it runs in TPU ResNet and EfficientNet code.

    .. math::
      r_t &= c \frac{\|w_{t-1}\|}{\|g_t\| + \lambda \|w_{t-1}\| + \epsilon} \\
      b_t &= \mu b_{t-1} + \eta_{t-1} r_t (g_t + \lambda w_{t-1}), \qquad w_t = w_{t-1} - b_t

    for each layer on its own. The momentum buffer holds steps, learning rate included, so a step
    taken at a high rate keeps its length after the rate falls. A leaf that does not adapt has
    :math:`r = 1`: momentum SGD; one that does not decay has :math:`\lambda = 0`.

    >>> import jax.numpy as jnp
    >>> tx = lars(10.0, weight_decay=0.0)
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> updates, state = tx.update({'kernel': jnp.array([0., 2.])}, tx.init(params), params)
    >>> print(updates['kernel'])  # 10 * 0.001 * 5 / 2 * 2
    [-0.   -0.05]

    Args:
      learning_rate: a number, or a schedule of the count of completed updates. With the
        coefficient of 0.001 the recipes' peaks lie near 10 to 36.
      momentum: :math:`\mu`; 0.9 in the paper.
      weight_decay: :math:`\lambda`; 1e-4 in the authors' ResNet-50 solver.
      coefficient: :math:`c`, the trust coefficient; 0.001 in the TPU code and the authors' Caffe.
      eps: :math:`\epsilon`; 0 in the TPU code.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`.
      norm: 'l2', 'l1' or 'linf'; the paper uses l2.
      zero_ratio: the ratio of a layer of which the weights or the gradient are all 0.
      axis_name: the mesh axis over which each leaf is split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      collect: keep each layer's trust ratio in the state.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, arXiv:1708.03888.
    """
    trust_ratio.check_range("momentum", momentum, upper=1.0)
    _check(learning_rate, rules, norm, {
        "weight_decay": weight_decay, "coefficient": coefficient, "eps": eps,
        "zero_ratio": zero_ratio,
    })

    def step(grad, buffer, weights, facts, step_size):
        decay = weight_decay if facts.decay else 0.0
        ratio = None
        if facts.adapt:
            ratio = trust_ratio.trust_ratio(
                trust_ratio.leaf_norm(weights, facts, norm, axis_name),
                trust_ratio.leaf_norm(grad, facts, norm, axis_name),
                coefficient=coefficient,
                eps=eps,
                decay=decay,
                zero_ratio=zero_ratio,
            )
        scale = step_size if ratio is None else step_size * ratio
        decayed = grad + decay * weights if facts.decay else grad
        buffer = momentum * buffer + scale * decayed
        return -buffer, buffer, ratio

    return _transform(step, learning_rate, rules, collect)


def lars_lamb_paper(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    weight_decay: float = 0.01,
    rules: Rules = parameters.DEFAULT_RULES,
    norm: str = "l2",
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    zero_ratio: float = 1.0,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformation:
    r"""LARS as Algorithm 1 of the LAMB paper.

    .. math::
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) (g_t + \lambda w_{t-1}) \\
      w_t &= w_{t-1} - \eta_{t-1} \frac{\phi(\|w_{t-1}\|)}{\|m_t\|} m_t

    for each layer on its own. A leaf that does not adapt has the ratio 1: momentum SGD.

    >>> import jax.numpy as jnp
    >>> tx = lars_lamb_paper(0.1, weight_decay=0.0)
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> updates, state = tx.update({'kernel': jnp.array([0., 2.])}, tx.init(params), params)
    >>> print(updates['kernel'])  # 0.1 * 5 / 0.2 * 0.2
    [-0.  -0.5]

    Args:
      learning_rate: a number, or a schedule of the count of completed updates.
      b1: :math:`\beta_1`; 0.9.
      weight_decay: :math:`\lambda`; goes into the momentum.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`.
      norm: 'l2', 'l1' or 'linf'.
      phi_bounds: the bounds of :math:`\phi`; by default it is the identity.
      zero_ratio: the ratio of a layer of which the weights or the momentum are all 0.
      axis_name: the mesh axis over which each leaf is split inside `shard_map` or `pmap`.
      collect: keep each layer's trust ratio in the state.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, Algorithm 1.
    """
    trust_ratio.check_range("b1", b1, upper=1.0)
    _check(learning_rate, rules, norm, {
        "weight_decay": weight_decay, "zero_ratio": zero_ratio,
    }, phi_bounds)

    def step(grad, mean, weights, facts, step_size):
        decayed = grad + weight_decay * weights if facts.decay else grad
        mean = b1 * mean + (1 - b1) * decayed
        ratio = None
        if facts.adapt:
            ratio = trust_ratio.trust_ratio(
                trust_ratio.leaf_norm(weights, facts, norm, axis_name),
                trust_ratio.leaf_norm(mean, facts, norm, axis_name),
                phi_bounds=phi_bounds,
                zero_ratio=zero_ratio,
            )
        scale = step_size if ratio is None else step_size * ratio
        return -scale * mean, mean, ratio

    return _transform(step, learning_rate, rules, collect)


def _check(learning_rate, rules, norm, nonnegative, phi_bounds=(0.0, math.inf)) -> None:
    parameters.check_rules(rules)
    trust_ratio.check(norm, phi_bounds, nonnegative)
    if not callable(learning_rate):
        trust_ratio.check_range("learning_rate", learning_rate)


def _transform(step, learning_rate, rules, collect) -> optax.GradientTransformation:
    """A transform from `step(grad, buffer, weights, facts, step_size)` of one leaf in float32.

    `step` returns (update, buffer, ratio or None).
    """

    def init_fn(params: optax.Params) -> LarsState:
        facts = parameters.resolve(params, rules)
        buffer = jax.tree.map(
            lambda p: jnp.zeros_like(p, dtype=trust_ratio.compute_dtype(p)), params
        )
        ratios = trust_ratio.initial_ratios(params, facts) if collect else None
        return LarsState(jnp.zeros((), jnp.int32), buffer, ratios)

    def update_fn(updates: optax.Updates, state: LarsState, params: optax.Params = None):
        trust_ratio.require_params(params)
        step_size = learning_rate(state.count) if callable(learning_rate) else learning_rate
        treedef = jax.tree.structure(params)
        rows = []
        for grad, buffer, param, facts in zip(
            treedef.flatten_up_to(updates),
            treedef.flatten_up_to(state.momentum),
            jax.tree.leaves(params),
            jax.tree.leaves(parameters.resolve(params, rules)),
            strict=True,
        ):
            dtype = trust_ratio.compute_dtype(param)
            update, buffer, ratio = step(
                grad.astype(dtype), buffer, jnp.asarray(param, dtype), facts,
                jnp.asarray(step_size, dtype),
            )
            rows.append((
                update.astype(jnp.result_type(param)), buffer,
                trust_ratio.collected(ratio, param, facts) if collect else None,
            ))
        steps, buffers, ratios = (
            treedef.unflatten(column) for column in (zip(*rows) if rows else ((),) * 3)
        )
        count = optax.safe_increment(state.count)
        return steps, LarsState(count, buffers, ratios if collect else None)

    return optax.GradientTransformation(init_fn, update_fn)
