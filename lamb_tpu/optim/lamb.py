r"""LAMB: Adam's direction, decayed, with one step length for each layer.

What is published under this name differs in a few choices, which are the arguments of `lamb`.
`presets.PRESETS['lamb']` has those of each published form, as in
`lamb(rate, **presets.preset('lamb', 'timm'))`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.directions import AdamDirection
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.trust_ratio import AxisName, Readings

BIAS_CORRECTIONS = ("moments", "none", "step")
DECAYS = ("direction", "decoupled", "gradient")


class LambState(NamedTuple):
    """State of `lamb`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments: the parameters' shapes, float32 unless nu_dtype is given
    readings: Readings | None


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

    With :math:`g_t` the gradient, for each layer on its own:

    .. math::
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
      u_t &= \frac{\hat m_t}{\sqrt{\hat v_t + \epsilon_r} + \epsilon} + \lambda w_{t-1} \\
      r_t &= \frac{\phi(\|w_{t-1}\|)}{\|u_t\| + \epsilon_\phi}, \quad
      w_t = w_{t-1} - \eta_{t-1} r_t u_t

    where :math:`\hat m_t = m_t / (1 - \beta_1^t)` and :math:`\hat v_t = v_t / (1 - \beta_2^t)`. A
    leaf that does not decay has :math:`\lambda = 0` and still adapts; one that does not adapt has
    the ratio 1 and still decays: the rules say which, and a weight decay of 0 changes neither.
    Arithmetic is in float32 (float64 for float64 leaves), whatever the dtype of parameters and
    gradients.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> def first_step(**arguments):
    ...     tx = lamb(0.1, **arguments)
    ...     return tx.update({'kernel': jnp.array([1., 1.])}, tx.init(params), params)
    >>> updates, state = first_step(weight_decay=0.0)
    >>> print(updates['kernel'].round(4))  # 0.1 * |(3, 4)| / |(1, 1)|
    [-0.3536 -0.3536]
    >>> updates, state = first_step(bias_correction='none', ratio_bounds=(0.0, 1.0), collect=True)
    >>> print(round(float(updates['kernel'][0]), 4), state.readings.ratios['kernel'])
    -0.3192 1.0

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates.
      b1: :math:`\beta_1`, in [0, 1); 0.9 in the paper.
      b2: :math:`\beta_2`, in [0, 1); 0.999 in the paper.
      eps: :math:`\epsilon`, outside the root; 1e-6 in the authors' code.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates; 0.01
        is the paper's value for BERT.
      bias_correction: 'moments', as above: the ICLR version of Algorithm 2 and the implementation
        that the paper names as the official one. 'none', :math:`\hat m_t = m_t` and
        :math:`\hat v_t = v_t`: the arXiv version and the authors' experiments, so the choice that
        repeats the paper's tables. 'step', moments as with 'none' and the step times
        :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`: that of DeepSpeed's kernel before it
        corrected the moments. The ratio does not cancel it: at the default betas the first 20
        steps have 0.15 to 0.32 of their length.
      decay: where the weight decay goes. 'direction', as above. 'decoupled': weights shrink to
        :math:`(1 - \eta \lambda) w` first; the ratio sees these and a direction without decay.
        'gradient': :math:`\lambda w` is added to the gradient, before the moments.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`.
        By default every leaf decays and adapts, as in Algorithm 2.
      norm: 'l2', 'l1' or 'linf'; the paper uses l2.
      phi_bounds: the bounds of :math:`\phi`; by default it is the identity.
      ratio_bounds: the bounds of the ratio :math:`r_t`; none in the paper.
      ratio_eps: :math:`\epsilon_\phi`; 0 in the paper.
      zero_ratio: the ratio of a layer of which the weights or the direction are all 0.
      eps_root: :math:`\epsilon_r`, inside the root; 0 in the paper.
      grad_averaging: False puts :math:`g_t` into the first moment whole, without the factor
        :math:`1 - \beta_1`.
      nesterov: 'first' is N-LAMB and 'both' NN-LAMB, of the paper's appendix with betas that stay
        constant: :math:`\hat m_t = \beta_1 m_t / (1 - \beta_1^{t+1}) + (1 - \beta_1) g_t / (1 -
        \beta_1^t)`, and :math:`\hat v_t = \beta_2 v_t / (1 - \beta_2^t)` in N-LAMB; in NN-LAMB
        :math:`\hat v_t = \beta_2 v_t / (1 - \beta_2^{t+1}) + (1 - \beta_2) g_t^2 / (1 -
        \beta_2^t)`. The denominators are 1 where the moments are not corrected.
      cautious: only the elements of Adam's direction that have the sign of the gradient are kept,
        divided by the fraction of a layer's elements that are kept, or by 0.001 if that is more,
        as in timm. Complex leaves have no signs, so they are refused.
      clip_global_norm: the l2 norm of all gradients together above which they are scaled down to
        it before anything else; 1.0 in the authors' code, not in the paper. None for no clipping.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      mu_dtype: the dtype in which first moments are kept; by default that of the arithmetic.
      nu_dtype: the same for second moments. bfloat16 is too narrow for them at b2 = 0.999.
      collect: keep each layer's trust ratio and norms in the state, see `readings.read`.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range or no choice, naming it.

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes,
      arXiv:1904.00962, Algorithm 2 and, for N-LAMB and NN-LAMB, the appendix.
    """
    adam = AdamDirection(
        b1,
        b2,
        eps,
        bias_correction == "moments",
        eps_root,
        grad_averaging,
        nesterov,
        cautious,
        mu_dtype,
        nu_dtype,
    )
    checks.check_schedule("weight_decay", weight_decay)
    trust_ratio.check(norm, phi_bounds, {"ratio_eps": ratio_eps, "zero_ratio": zero_ratio})
    checks.check_bounds("ratio_bounds", ratio_bounds)
    checks.check_choice("bias_correction", bias_correction, BIAS_CORRECTIONS)
    checks.check_choice("decay", decay, DECAYS)

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: jax.Array) -> Step:
        weights, facts, real = leaf.weights, leaf.facts, leaf.rate.dtype
        decays = decay if facts.decay else None
        decayed = leafwise.decay_at(weight_decay, facts, leaf.completed, real) * weights
        # As an L2 term of the loss: the decay enters both moments.
        if decays == "gradient":
            leaf = leaf._replace(grad=leaf.grad + decayed)
        mu, nu = adam.moments(leaf, mu, nu)
        undecayed = adam.direction(leaf, mu, nu)

        # u_t of Algorithm 2. It is a function, so that it can be computed twice, see below.
        def direction(mu: jax.Array, nu: jax.Array) -> jax.Array:
            value = undecayed(mu, nu)
            return value + decayed if decays == "direction" else value

        ratio = None
        # The first pass over the leaf. Where it adapts, only the norm of this result is used.
        step = direction(mu, nu)
        if facts.adapt:
            # Keras shrinks the weights before it takes their norm.
            shrunk = weights - leaf.rate * decayed if decays == "decoupled" else weights
            ratio = trust_ratio.trust_ratio(
                trust_ratio.leaf_norm(shrunk, facts, norm, leaf.axis_name),
                trust_ratio.leaf_norm(step, facts, norm, leaf.axis_name),
                eps=ratio_eps,
                phi_bounds=phi_bounds,
                ratio_bounds=ratio_bounds,
                zero_ratio=zero_ratio,
            )
            # A second pass computes the direction anew from the moments, which costs less than
            # writing it out and reading it back. The barrier keeps the two from being merged.
            step = ratio * direction(*jax.lax.optimization_barrier((mu, nu)))
        length = leaf.rate
        # The factor stands outside the ratio, which would cancel any factor of the direction.
        if bias_correction == "step":
            root = jnp.sqrt(one_minus_power(b2, leaf.count, real))
            length = length * root / one_minus_power(b1, leaf.count, real)
        update = -length * step
        # The decay is not part of the direction, so the ratio does not scale it.
        if decays == "decoupled":
            update = update - leaf.rate * decayed
        return update, (mu, nu), ratio

    return leafwise.transform(
        LambState,
        adam.init_leaf,
        step_leaf,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        axis_name=axis_name,
        collect=collect,
        real_only=adam.real_only,
    )
