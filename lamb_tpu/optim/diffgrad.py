r"""diffGrad: Adam with a step that is shorter where the gradient changes little."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Readings


class DiffgradState(NamedTuple):
    """State of `diffgrad`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments: the parameters' shapes, float32 unless nu_dtype is given
    previous: Any  # the gradients of the last update, decay included: float32
    readings: Readings | None


def diffgrad(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    clip_global_norm: float | None = None,
    axis_name: AxisName = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""diffGrad, as in the second version of the authors' code.

    .. math::
      d_t &= g_t + \lambda w_{t-1}, \quad \xi_t = \frac{1}{1 + \exp(-|d_{t-1} - d_t|)}, \quad
      d_0 = 0 \\
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) d_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) d_t^2 \\
      w_t &= w_{t-1} - \eta_{t-1} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
      \frac{\xi_t m_t}{\sqrt{v_t} + \epsilon}

    element by element. :math:`\xi` is 0.5 where the gradient stays the same and nears 1 where it
    changes by much more than 1, so what it does depends on the scale of the loss. The first
    version of the authors' code compared each gradient with itself, so that :math:`\xi` was 0.5
    after the first update: Adam at half the rate. The decay is part of the gradient; a leaf that
    does not decay has :math:`\lambda = 0`. There is no trust ratio, so whether a leaf adapts
    changes nothing. Arithmetic is in float32 (float64 for float64 leaves).

    >>> import jax.numpy as jnp
    >>> tx = diffgrad(0.1)
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> state = tx.init(params)
    >>> for _ in range(2):  # 0.1 / (1 + exp(-|0 - g|)), then 0.1 / (1 + exp(0))
    ...     updates, state = tx.update({'kernel': jnp.array([1., -20.])}, state, params)
    ...     print([round(float(x), 4) for x in updates['kernel']])
    [-0.0731, 0.1]
    [-0.05, 0.05]

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates; 1e-3
        in the authors' code.
      b1: :math:`\beta_1`, in [0, 1); 0.9 in the authors' code.
      b2: :math:`\beta_2`, in [0, 1); 0.999 in the authors' code.
      eps: :math:`\epsilon`, added to the root of the second moment before that is corrected for
        its start at 0; 1e-8 in the authors' code. Adam adds it after the correction.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates; 0 in
        the authors' code.
      rules: which leaves decay, see `parameters.resolve`.
      clip_global_norm: the l2 norm of all gradients together above which they are scaled down to
        it before anything else; None for no clipping.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, for
        clipping and `collect`, see `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      mu_dtype: the dtype in which first moments are kept; by default that of the arithmetic.
      nu_dtype: the same for second moments. bfloat16 is too narrow for them at b2 = 0.999.
      collect: keep each layer's norms in the state, see `readings.read`.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      Dubey et al., diffGrad: An Optimization Method for Convolutional Neural Networks,
      arXiv:1909.11015, with its code, diffGrad_v2.py.
    """
    checks.check_range("b1", b1, upper=1.0)
    checks.check_range("b2", b2, upper=1.0)
    checks.check_range("eps", eps)
    checks.check_schedule("weight_decay", weight_decay)
    checks.check_dtype("mu_dtype", mu_dtype)
    checks.check_dtype("nu_dtype", nu_dtype, squares=True)

    def init_leaf(param: jax.Array, facts: ParameterFacts, split: Split) -> tuple[Any, ...]:
        del facts, split
        mu, nu = leafwise.zeros_like(param, mu_dtype), leafwise.zero_squares(param, nu_dtype)
        return mu, nu, leafwise.zeros_like(param)

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: jax.Array, previous: jax.Array) -> Step:
        grad, weights, facts = leaf.grad, leaf.weights, leaf.facts
        rate, completed, count = leaf.rate, leaf.completed, leaf.count
        dtype, real = weights.dtype, rate.dtype
        if facts.decay:
            grad = grad + leafwise.decay_at(weight_decay, facts, completed, real) * weights
        mu = (b1 * mu.astype(dtype) + (1 - b1) * grad).astype(mu.dtype)
        square = trust_ratio.real_product((1 - b2) * grad, grad)
        nu = (b2 * nu.astype(real) + square).astype(nu.dtype)
        # xi_t; the previous gradient holds the decay too.
        friction = jax.nn.sigmoid(jnp.abs(previous - grad))
        # The bias corrections stand outside the division, so that eps is added before them.
        correction = jnp.sqrt(one_minus_power(b2, count, real)) / one_minus_power(b1, count, real)
        direction = friction * mu.astype(dtype) / (trust_ratio.root(nu.astype(real)) + eps)
        return -rate * correction * direction, (mu, nu, grad), None

    return leafwise.transform(
        DiffgradState,
        init_leaf,
        step_leaf,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        axis_name=axis_name,
        collect=collect,
    )
