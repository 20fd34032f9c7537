r"""LAMB: Adam's direction plus weight decay, with one step length per layer.

Published implementations of LAMB differ in a few choices, which are the arguments of `lamb`.
`presets.PRESETS['lamb']` has the arguments that reproduce each implementation, for example
`lamb(rate, **presets.preset('lamb', 'timm'))`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.directions import NESTEROVS, AdamDirection
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics, LayerRatio

BIAS_CORRECTIONS = ("moments", "none", "step")
DECAYS = ("direction", "decoupled", "gradient")


class LambState(NamedTuple):
    """State of `lamb`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments: the parameters' shapes, float32 unless nu_dtype is given
    diagnostics: Diagnostics | None


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.01,
    bias_correction: str = "moments",
    decay: str = "direction",
    rules: Rules = parameters.DEFAULT_RULES,
    norm: str = "l2",
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    ratio_bounds: tuple[float, float] = (0.0, math.inf),
    ratio_eps: float = 0.0,
    zero_ratio: float = 1.0,
    eps_root: float = 0.0,
    grad_averaging: bool = True,
    nesterov: str = "none",
    cautious: bool = False,
    clip_global_norm: float | None = None,
    axis_name: AxisName = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The LAMB optimizer; by default Algorithm 2 of the paper's ICLR version.

    For each layer separately, with the gradient :math:`g_t`:

    .. math::
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
      u_t &= \frac{\hat m_t}{\sqrt{\hat v_t + \epsilon_r} + \epsilon} + \lambda w_{t-1} \\
      r_t &= \frac{\phi(\|w_{t-1}\|)}{\|u_t\| + \epsilon_\phi}, \quad
      w_t = w_{t-1} - \eta_{t-1} r_t u_t

    where :math:`\hat m_t = m_t / (1 - \beta_1^t)` and :math:`\hat v_t = v_t / (1 - \beta_2^t)`. A
    leaf that does not decay has :math:`\lambda = 0` and still adapts. A leaf that does not adapt
    has the ratio 1 and still decays. Only the rules decide this; a weight decay of 0 does not turn
    adaptation off.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> def first_step(**arguments):
    ...     tx = lamb(0.1, **arguments)
    ...     return tx.update({'kernel': jnp.array([1., 1.])}, tx.init(params), params)
    >>> updates, state = first_step(weight_decay=0.0)
    >>> print(updates['kernel'].round(4))  # 0.1 * |(3, 4)| / |(1, 1)|
    [-0.3536 -0.3536]
    >>> updates, state = first_step(bias_correction='none', ratio_bounds=(0.0, 1.0), collect=True)
    >>> print(round(float(updates['kernel'][0]), 4), state.diagnostics.ratios['kernel'])
    -0.3192 1.0

    Args:
      learning_rate: :math:`\eta`. `lamb_tpu.optim` describes all arguments that are not listed
        here.
      b1: :math:`\beta_1`, in [0, 1); 0.9 in the paper.
      b2: :math:`\beta_2`, in [0, 1); 0.999 in the paper.
      eps: :math:`\epsilon`, outside the root; 1e-6 in the authors' code.
      weight_decay: :math:`\lambda`; 0.01 is the paper's value for BERT.
      bias_correction: one of

        - 'moments': as above, like the ICLR version of Algorithm 2 and the implementation that the
          paper calls official.
        - 'none': :math:`\hat m_t = m_t` and :math:`\hat v_t = v_t`, like the arXiv version and the
          authors' experiments. Use 'none' to reproduce the paper's tables.
        - 'step': as 'none', with the step multiplied by
          :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`, like early versions of DeepSpeed's kernel;
          later versions correct the moments. The ratio does not cancel this factor: with the default
          betas the factor multiplies the length of the first 20 steps by 0.15 to 0.32.

      decay: where the weight decay is added; one of

        - 'direction': as above.
        - 'decoupled': the weights are first shrunk to :math:`(1 - \eta \lambda) w`. The ratio is
          computed from the shrunk weights and a direction without decay.
        - 'gradient': the decay is added to the gradient, before the moments.
      norm: 'l2', 'l1' or 'linf'; the paper uses l2.
      phi_bounds: the bounds of :math:`\phi`, which is the identity by default.
      ratio_bounds: the bounds of the ratio :math:`r_t`; the paper has no bounds.
      ratio_eps: :math:`\epsilon_\phi`; 0 in the paper.
      zero_ratio: the ratio of a layer if its weights or its direction are all 0.
      eps_root: :math:`\epsilon_r`, inside the root; 0 in the paper.
      grad_averaging: whether :math:`g_t` is added to the first moment with the factor
        :math:`1 - \beta_1`; if False, :math:`g_t` is added without this factor.
      nesterov: 'first' is N-LAMB and 'both' is NN-LAMB, as in the paper's appendix with constant
        betas. Both have
        :math:`\hat m_t = \beta_1 m_t / (1 - \beta_1^{t+1}) + (1 - \beta_1) g_t / (1 - \beta_1^t)`.
        N-LAMB has :math:`\hat v_t = \beta_2 v_t / (1 - \beta_2^t)`, and NN-LAMB
        :math:`\hat v_t = \beta_2 v_t / (1 - \beta_2^{t+1}) + (1 - \beta_2) g_t^2 / (1 - \beta_2^t)`.
        The denominators are 1 if the moments are not corrected.
      cautious: whether to zero the elements of Adam's direction that differ in sign from the
        gradient, and to divide the other elements by their fraction of all elements of the layer
        (at least 0.001), as in timm. Complex leaves are rejected, because complex numbers have no
        sign.
      clip_global_norm: 1.0 in the authors' code; the paper does not clip.

    Raises:
      ValueError: an argument is out of range or unknown; from `init`, a leaf is complex although
        `cautious` is True, or the rules do not fit the parameters.

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes,
      arXiv:1904.00962, Algorithm 2 and, for N-LAMB and NN-LAMB, the appendix.
    """
    given = checks.checked(lamb, locals())
    checks.check_choices(
        bias_correction=(bias_correction, BIAS_CORRECTIONS),
        decay=(decay, DECAYS),
        norm=(norm, trust_ratio.NORMS),
        nesterov=(nesterov, NESTEROVS),
    )
    adam = AdamDirection(**given)
    ratio = LayerRatio(norm, 1.0, ratio_eps, phi_bounds, ratio_bounds, zero_ratio)
    step = _Step(**given, adam=adam, ratio=ratio)
    return leafwise.transform(LambState, adam.init_leaf, step, **leafwise.common(given))


class _Step(leafwise.Arguments):
    def __call__(self, leaf: Leaf, mu: jax.Array, nu: jax.Array) -> Step:
        weights, metadata = leaf.weights, leaf.metadata
        decays = self.decay if metadata.decay else None
        decayed = leafwise.decay_of(leaf, self.weight_decay) * weights
        # As for an L2 term in the loss, the decay enters both moments.
        if decays == "gradient":
            leaf = leaf._replace(grad=leaf.grad + decayed)
        mu, nu = self.adam.moments(leaf, mu, nu)
        undecayed = self.adam.direction(leaf, mu, nu)

        # This function returns u_t of Algorithm 2 and is called twice below.
        def direction(mu: jax.Array, nu: jax.Array) -> jax.Array:
            value = undecayed(mu, nu)
            return value + decayed if decays == "direction" else value

        ratio = None
        # This is the first pass over the leaf. If the leaf adapts, only the norm of `step` is used.
        step = direction(mu, nu)
        if metadata.adapt:
            # Keras shrinks the weights before it computes their norm.
            shrunk = weights - leaf.rate * decayed if decays == "decoupled" else weights
            ratio = self.ratio.of(shrunk, step, metadata, leaf.axis_name)
            # A second pass recomputes the direction from the moments, which is cheaper than
            # writing it to memory and reading it back. The barrier stops XLA from merging the passes.
            step = ratio * direction(*jax.lax.optimization_barrier((mu, nu)))
        length = leaf.rate
        # Apply the factor outside the ratio, which would cancel any factor of the direction.
        if self.bias_correction == "step":
            length = length * jnp.sqrt(leafwise.correction(leaf, self.adam.b2))
            length = length / leafwise.correction(leaf, self.adam.b1)
        update = -length * step
        # Decoupled decay is not part of the direction, so the ratio does not scale it.
        if decays == "decoupled":
            update = update - leaf.rate * decayed
        return update, (mu, nu), ratio
