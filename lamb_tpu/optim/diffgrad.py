r"""diffGrad: Adam with shorter steps where the gradient has changed little since the last update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics


class DiffgradState(NamedTuple):
    """State of `diffgrad`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments: the parameters' shapes, float32 unless nu_dtype is given
    previous: Any  # the gradients of the last update, including decay: float32
    diagnostics: Diagnostics | None


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
    r"""The diffGrad optimizer, as in the second version of the authors' code.

    .. math::
      d_t &= g_t + \lambda w_{t-1}, \quad \xi_t = \frac{1}{1 + \exp(-|d_{t-1} - d_t|)}, \quad
      d_0 = 0 \\
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) d_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) d_t^2 \\
      w_t &= w_{t-1} - \eta_{t-1} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
      \frac{\xi_t m_t}{\sqrt{v_t} + \epsilon}

    for each element. :math:`\xi` is 0.5 where the gradient does not change, and approaches 1 where
    the change is much larger than 1, so the effect of :math:`\xi` depends on the scale of the loss.
    The first version of the authors' code could compare a gradient with itself; :math:`\xi` was
    then 0.5 from the second update on, which is Adam at half the rate. The decay is part of the
    gradient; a leaf that does not decay has :math:`\lambda = 0`. There is no trust ratio, so
    `adapt` of the rules has no effect.

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
      learning_rate: :math:`\eta`; 1e-3 in the authors' code. `lamb_tpu.optim` describes all
        arguments that are not listed here.
      b1: :math:`\beta_1`, in [0, 1); 0.9 in the authors' code.
      b2: :math:`\beta_2`, in [0, 1); 0.999 in the authors' code.
      eps: :math:`\epsilon`, added to the root of the second moment before the bias correction (Adam
        adds it after the bias correction); 1e-8 in the authors' code.
      weight_decay: :math:`\lambda`; 0 in the authors' code.

    References:
      Dubey et al., diffGrad: An Optimization Method for Convolutional Neural Networks,
      arXiv:1909.11015, with its code, diffGrad_v2.py.
    """
    given = checks.checked(diffgrad, locals())

    def init_leaf(param: jax.Array, metadata: ParameterMetadata, split: Split) -> tuple[Any, ...]:
        del metadata, split
        return *leafwise.initial_moments(param, mu_dtype, nu_dtype), leafwise.zeros_like(param)

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: jax.Array, previous: jax.Array) -> Step:
        grad = leaf.grad
        if leaf.metadata.decay:
            grad = grad + leafwise.decay_of(leaf, weight_decay) * leaf.weights
        mu, nu = leafwise.moments(leaf, grad, mu, nu, b1, b2)
        # xi_t; the previous gradient also includes the decay.
        friction = jax.nn.sigmoid(jnp.abs(previous - grad))
        root = trust_ratio.root(nu.astype(leaf.rate.dtype))
        direction = friction * mu.astype(leaf.weights.dtype) / (root + eps)
        # Apply the bias corrections after the division, so that eps is added before them.
        step = -leaf.rate * leafwise.step_correction(leaf, b1, b2) * direction
        return step, (mu, nu, grad), None

    return leafwise.transform(DiffgradState, init_leaf, step_leaf, **leafwise.common(given))
