r"""LAMB: Adam's direction, decayed, with one step length for each layer.

References:
  You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes,
  arXiv:1904.00962, Algorithm 2.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import parameters, trust_ratio
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.trust_ratio import AxisName


class LambState(NamedTuple):
    """State of `lamb`."""

    count: jax.Array  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments: the parameters' shapes, float32 unless nu_dtype is given
    ratios: Any  # None, or a float32 per leaf, shaped by its layer axes: (), or (num_layers,)


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    rules: Rules = parameters.DEFAULT_RULES,
    norm: str = "l2",
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    ratio_eps: float = 0.0,
    zero_ratio: float = 1.0,
    axis_name: AxisName = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    collect: bool = False,
) -> optax.GradientTransformation:
    r"""The LAMB optimizer.

    With :math:`g_t` the gradient, for each layer on its own:

    .. math::
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
      u_t &= \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} + \lambda w_{t-1} \\
      w_t &= w_{t-1} - \eta_{t-1} \frac{\phi(\|w_{t-1}\|)}{\|u_t\|} u_t

    where :math:`\hat m_t = m_t / (1 - \beta_1^t)` and :math:`\hat v_t = v_t / (1 - \beta_2^t)`, or
    the moments themselves without bias correction. A leaf that does not decay has
    :math:`\lambda = 0` and still adapts; one that does not adapt has the ratio 1 and still decays:
    the rules say which, and a weight decay of 0 changes neither. Arithmetic is in float32 (float64
    for float64 leaves), whatever the dtype of parameters and gradients.

    >>> import jax.numpy as jnp
    >>> tx = lamb(0.1, weight_decay=0.0)
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> updates, state = tx.update({'kernel': jnp.array([1., 1.])}, tx.init(params), params)
    >>> print(updates['kernel'].round(4))  # 0.1 * |(3, 4)| / |(1, 1)|
    [-0.3536 -0.3536]

    Args:
      learning_rate: a number, or a schedule of the count of completed updates.
      b1: :math:`\beta_1`; 0.9 in the paper.
      b2: :math:`\beta_2`; 0.999 in the paper.
      eps: :math:`\epsilon`, outside the root; 1e-6 in the authors' code.
      weight_decay: :math:`\lambda`; 0.01 is the paper's value for BERT.
      bias_correction: on in the ICLR version of Algorithm 2 and in the implementation that the
        paper names as the official one; off in the arXiv version and in the authors' experiments,
        so turn it off to repeat the paper's tables.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`.
        By default every leaf decays and adapts, as in Algorithm 2.
      norm: 'l2', 'l1' or 'linf'; the paper uses l2.
      phi_bounds: the bounds of :math:`\phi`; by default it is the identity.
      ratio_eps: added to :math:`\|u_t\|`; 0 in the paper.
      zero_ratio: the ratio of a layer of which the weights or the direction are all 0.
      axis_name: the mesh axis over which each leaf is split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      mu_dtype: the dtype in which first moments are kept; by default that of the arithmetic.
      nu_dtype: the same for second moments. bfloat16 is too narrow for them at b2 = 0.999.
      collect: keep each layer's trust ratio in the state.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range, naming it.
    """
    parameters.check_rules(rules)
    trust_ratio.check(
        norm,
        phi_bounds,
        {
            "eps": eps, "weight_decay": weight_decay, "ratio_eps": ratio_eps,
            "zero_ratio": zero_ratio,
        },
    )
    trust_ratio.check_range("b1", b1, upper=1.0)
    trust_ratio.check_range("b2", b2, upper=1.0)
    if not callable(learning_rate):
        trust_ratio.check_range("learning_rate", learning_rate)

    def init_fn(params: optax.Params) -> LambState:
        facts = parameters.resolve(params, rules)

        def zeros(dtype):
            return jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype=dtype or trust_ratio.compute_dtype(p)), params
            )

        ratios = trust_ratio.initial_ratios(params, facts) if collect else None
        return LambState(jnp.zeros((), jnp.int32), zeros(mu_dtype), zeros(nu_dtype), ratios)

    def update_fn(updates: optax.Updates, state: LambState, params: optax.Params = None):
        trust_ratio.require_params(params)
        count = optax.safe_increment(state.count)
        step_size = learning_rate(state.count) if callable(learning_rate) else learning_rate
        treedef = jax.tree.structure(params)

        @functools.cache
        def scales(dtype):
            if not bias_correction:
                return 1.0, 1.0
            return tuple(1 / one_minus_power(base, count, dtype) for base in (b1, b2))

        rows = []
        for grad, mu, nu, param, facts in zip(
            treedef.flatten_up_to(updates),
            treedef.flatten_up_to(state.mu),
            treedef.flatten_up_to(state.nu),
            jax.tree.leaves(params),
            jax.tree.leaves(parameters.resolve(params, rules)),
            strict=True,
        ):
            dtype = trust_ratio.compute_dtype(param)
            grad, weights = grad.astype(dtype), jnp.asarray(param, dtype)
            mu = (b1 * mu.astype(dtype) + (1 - b1) * grad).astype(mu.dtype)
            nu = (b2 * nu.astype(dtype) + (1 - b2) * grad * grad).astype(nu.dtype)
            scale_mu, scale_nu = scales(dtype)

            def direction(mu, nu):
                root = jnp.sqrt(scale_nu * nu.astype(dtype))
                value = scale_mu * mu.astype(dtype) / (root + eps)
                return value + weight_decay * weights if facts.decay else value

            ratio = None
            step = direction(mu, nu)
            if facts.adapt:
                ratio = trust_ratio.trust_ratio(
                    trust_ratio.leaf_norm(weights, facts, norm, axis_name),
                    trust_ratio.leaf_norm(step, facts, norm, axis_name),
                    eps=ratio_eps,
                    phi_bounds=phi_bounds,
                    zero_ratio=zero_ratio,
                )
                # A second pass computes the direction anew from the moments, which costs less than
                # writing it out and reading it back. The barrier keeps the two from being merged.
                step = ratio * direction(*jax.lax.optimization_barrier((mu, nu)))
            step = -jnp.asarray(step_size, dtype) * step
            rows.append((
                step.astype(jnp.result_type(param)), mu, nu,
                trust_ratio.collected(ratio, param, facts) if collect else None,
            ))
        steps, mus, nus, ratios = (
            treedef.unflatten(column) for column in (zip(*rows) if rows else ((),) * 4)
        )
        return steps, LambState(count, mus, nus, ratios if collect else None)

    return optax.GradientTransformation(init_fn, update_fn)


def one_minus_power(base: float | jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
    """1 - base ** count without cancellation: at b2 = 0.999 the plain form is off by 2e-5."""
    if isinstance(base, jax.Array):
        log = jnp.log(base.astype(dtype))
    else:
        log = math.log(base) if base else -math.inf
    return -jnp.expm1(log * count.astype(dtype))
