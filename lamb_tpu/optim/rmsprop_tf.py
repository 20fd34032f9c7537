r"""RMSProp in TensorFlow's form, which EfficientNet's recipe uses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.directions import Momentum
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics

DECAYS = ("gradient", "decoupled")


class RmspropTfState(NamedTuple):
    """State of `rmsprop_tf`. Averages and momentum have the parameters' shapes, float32 by default."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    nu: Any  # second moments
    mean: Any  # moving means of the gradients; None for every leaf unless `centered`
    momentum: Any  # the momentum; None for every leaf if the argument `momentum` is 0
    diagnostics: Diagnostics | None


def rmsprop_tf(
    learning_rate: optax.ScalarOrSchedule,
    b2: float = 0.9,
    momentum: float = 0.9,
    eps: float = 1e-3,
    initial_scale: float = 1.0,
    eps_in_root: bool = True,
    centered: bool = False,
    bias_correction: bool = False,
    lr_in_momentum: bool = True,
    nesterov: bool = False,
    cautious: bool = False,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    decay: str = "gradient",
    rules: Rules = parameters.DEFAULT_RULES,
    clip_global_norm: float | None = None,
    axis_name: AxisName = None,
    momentum_dtype: Any = None,
    nu_dtype: Any = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The RMSProp optimizer; by default the form in EfficientNet's TensorFlow code.

    .. math::
      v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad v_0 = 1 \\
      b_t &= \mu b_{t-1} + \eta_{t-1} \frac{g_t}{\sqrt{v_t + \epsilon}}, \quad
      w_t = w_{t-1} - b_t

    for each element. Because :math:`v` starts at 1, and :math:`\epsilon` is large and inside the
    root, the first steps are shorter than in other forms of RMSProp. A learning rate that was tuned
    for another form does not suit this form. The momentum accumulates steps that include the rate,
    so a step taken at a high rate keeps its length after the rate falls. There is no trust ratio,
    so `adapt` of the rules has no effect.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> def two_steps(**arguments):
    ...     tx = rmsprop_tf(0.1, eps=0.01, **arguments)
    ...     state, steps = tx.init(params), []
    ...     for _ in range(2):
    ...         updates, state = tx.update({'kernel': jnp.array([0., 2.])}, state, params)
    ...         steps.append(round(float(updates['kernel'][1]), 4))
    ...     return steps
    >>> two_steps()  # 0.2 / sqrt(0.9 + 0.4 + 0.01), then 0.9 of it + 0.2 / sqrt(0.9 * 1.3 + 0.41)
    [-0.1747, -0.3164]
    >>> two_steps(initial_scale=0.0, eps_in_root=False)
    [-0.3113, -0.507]

    Args:
      learning_rate: :math:`\eta`; 0.016 per 256 examples of the batch in EfficientNet's code.
        `lamb_tpu.optim` describes all arguments that are not listed here.
      b2: :math:`\beta_2`, in [0, 1); TensorFlow's argument `decay`. The defaults of all arguments are
        the values of EfficientNet's code.
      momentum: :math:`\mu`, in [0, 1). With the number 0 there is no momentum buffer.
      eps: :math:`\epsilon`.
      initial_scale: :math:`v_0`; 1 in TensorFlow 1, 0 in Keras, PyTorch and by default in Optax.
      eps_in_root: whether the denominator is :math:`\sqrt{v_t + \epsilon}`; if False, the
        denominator is :math:`\sqrt{v_t} + \epsilon`.
      centered: whether to subtract from :math:`v_t` the square of the moving mean of gradients,
        which starts at 0.
      bias_correction: whether to divide both moving averages by :math:`1 - \beta_2^t`. Use this with
        `initial_scale` 0.
      lr_in_momentum: whether the learning rate multiplies each summand of the momentum; if False,
        the rate multiplies the momentum.
      nesterov: whether to step along :math:`\mu b_t` plus the summand of update t, not along :math:`b_t`.
      cautious: as in `lamb`, but for the elements of the step instead of Adam's direction.
      weight_decay: :math:`\lambda`. EfficientNet's code adds to the loss 0.5e-5 times the sum of
        squares of all parameters except those of BatchNorm, which is a weight decay of 1e-5 in the
        gradient.
      decay: 'gradient' adds :math:`\lambda w_{t-1}` to the gradient after clipping; 'decoupled'
        subtracts :math:`\eta_{t-1} \lambda w_{t-1}` from the weights instead.
      axis_name: only used for clipping, `cautious` and `collect`.

    References:
      Wongpanich et al., Training EfficientNets at Supercomputer Scale, arXiv:2011.00071, for the
      recipe; models/official/efficientnet/utils.py of tensorflow/tpu for the numbers.
    """
    given = checks.checked(rmsprop_tf, locals())
    checks.check_choices(decay=(decay, DECAYS))
    heavy_ball = Momentum(**given, dampening=0.0, dampen_first=True)
    # Under `optax.inject_hyperparams` the momentum is an array that may change during a run.
    has_momentum = isinstance(momentum, jax.Array) or momentum != 0
    step = _Step(**given | {"momentum": heavy_ball if has_momentum else None})
    return leafwise.transform(RmspropTfState, step.init_leaf, step, **leafwise.common(given))


class _Step(leafwise.Arguments):
    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[Any, ...]:
        nu = leafwise.zero_squares(param, self.nu_dtype)
        mean = leafwise.zeros_like(param) if self.centered else None
        (buffer,) = self.momentum.init_leaf(param, metadata, split) if self.momentum else (None,)
        return jnp.full_like(nu, self.initial_scale), mean, buffer

    def __call__(self, leaf: Leaf, nu: jax.Array, mean: Any, buffer: Any) -> Step:
        grad, metadata, rate = leaf.grad, leaf.metadata, leaf.rate
        decayed = leafwise.decay_of(leaf, self.weight_decay) * leaf.weights
        if metadata.decay and self.decay == "gradient":
            grad = grad + decayed
        root, nu, mean = self.root(leaf, grad, nu, mean)
        summand = grad / root
        # The learning rate multiplies the summand of the momentum b_t here, or the step below.
        if self.lr_in_momentum:
            summand = rate * summand
        step = summand
        if self.momentum:
            step, buffer = self.momentum.step(leaf, buffer, summand)
        if self.cautious:
            same_sign = (step * grad > 0).astype(leaf.weights.dtype)
            fraction = trust_ratio.leaf_mean(same_sign, metadata, leaf.axis_name)
            step = step * (same_sign / jnp.maximum(fraction, 1e-3))
        if not self.lr_in_momentum:
            step = rate * step
        # Decoupled decay is outside the momentum and the mask.
        if metadata.decay and self.decay == "decoupled":
            step = step + rate * decayed
        return -step, (nu, mean, buffer), None

    def root(self, leaf: Leaf, grad: jax.Array, nu: jax.Array, mean: Any) -> tuple[Any, Any, Any]:
        """Returns the denominator and the new moving averages."""
        correction: float | jax.Array = 1.0
        if self.bias_correction:
            correction = 1 / leafwise.correction(leaf, self.b2)
        nu = self.average(nu, trust_ratio.real_product(grad, grad))
        square = correction * nu.astype(leaf.rate.dtype)
        if self.centered:
            mean = self.average(mean, grad)
            # Rounding can make the variance negative.
            center = correction * mean
            square = jnp.maximum(square - trust_ratio.real_product(center, center), 0.0)
        if self.eps_in_root:
            return trust_ratio.root(square + self.eps), nu, mean
        return trust_ratio.root(square) + self.eps, nu, mean

    def average(self, old: jax.Array, sample: jax.Array) -> jax.Array:
        """Returns a moving average, updated with a new sample."""
        return (self.b2 * old.astype(sample.dtype) + (1 - self.b2) * sample).astype(old.dtype)
