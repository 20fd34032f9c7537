r"""LARS: momentum SGD with a separate step length for each layer.

Published implementations of LARS differ in four choices, which are arguments of `lars`: what
the ratio divides by, what the momentum accumulates, where weight decay is added, and how the ratio
is bounded. A learning rate that was tuned for one form does not suit the other forms.
`presets.PRESETS['lars']` has the arguments that reproduce each implementation, for example
`lars(rate, **presets.preset('lars', 'larc'))`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.directions import Momentum
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics, LayerRatio

DENOMINATORS = ("gradient", "decayed", "momentum")
ACCUMULATES = ("steps", "adapted", "gradients")


class LarsState(NamedTuple):
    """State of `lars`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    momentum: Any  # the parameters' shapes, float32 unless momentum_dtype is given
    diagnostics: Diagnostics | None


def lars(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    coefficient: float = 0.001,
    eps: float = 0.0,
    denominator: str = "gradient",
    accumulate: str = "steps",
    nesterov: bool = False,
    dampening: float = 0.0,
    dampen_first: bool = True,
    l2_in_loss: bool = False,
    trust_clip: bool = False,
    skip_zero: bool = False,
    rules: Rules = parameters.DEFAULT_RULES,
    norm: str = "l2",
    phi_bounds: tuple[float, float] = (0.0, math.inf),
    zero_ratio: float = 1.0,
    clip_global_norm: float | None = None,
    momentum_dtype: Any = None,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The LARS optimizer; by default the 2017 form, as in TPU ResNet and EfficientNet code.

    .. math::
      d_t &= g_t + \lambda w_{t-1} \\
      r_t &= c \frac{\phi(\|w_{t-1}\|)}{\|g_t\| + \lambda \|w_{t-1}\| + \epsilon} \\
      b_t &= \mu b_{t-1} + \eta_{t-1} r_t d_t, \qquad w_t = w_{t-1} - b_t

    for each layer separately, with the learning rate :math:`\eta_{t-1}`. The momentum accumulates
    steps that include the rate, so a step taken at a high rate keeps its length after the rate
    falls. A leaf that does not adapt has :math:`r = 1`, which is momentum SGD. A leaf that does not
    decay has :math:`\lambda = 0`.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu.optim.presets import preset
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> def two_steps(tx):
    ...     state, steps = tx.init(params), []
    ...     for _ in range(2):
    ...         updates, state = tx.update({'kernel': jnp.array([0., 2.])}, state, params)
    ...         steps.append(round(float(updates['kernel'][1]), 4))
    ...     return steps
    >>> rate = lambda t: jnp.array([10., 0.])[t]
    >>> two_steps(lars(rate, weight_decay=0.0))  # 10 * 0.001 * 5 / 2 * 2, then 0.9 of it
    [-0.05, -0.045]
    >>> two_steps(lars(rate, weight_decay=0.0, accumulate='adapted'))
    [-0.05, -0.0]
    >>> arguments = preset('lars', 'lamb_paper') | {'weight_decay': 0.0}
    >>> two_steps(lars(0.1, **arguments))  # 0.1 * 5, whatever the length of the momentum
    [-0.5, -0.5]

    Args:
      learning_rate: peaks at 10 to 36 in recipes with the coefficient 0.001. `lamb_tpu.optim`
        describes all arguments that are not listed here.
      momentum: :math:`\mu`, in [0, 1); 0.9 in the paper.
      weight_decay: :math:`\lambda`; 1e-4 in the authors' ResNet-50 solver.
      coefficient: :math:`c`, the trust coefficient; 0.001 in the TPU code and the authors' Caffe.
      eps: :math:`\epsilon`; 0 in the TPU code.
      denominator: what the ratio divides by: 'gradient', the norm of the raw gradient plus the norm
        of the decay, as above; 'decayed', :math:`\|d_t\| + \epsilon`; or 'momentum',
        :math:`\|u_t\| + \epsilon` with the direction :math:`u_t` after the momentum.
      accumulate: what the momentum accumulates: 'steps', :math:`\eta_{t-1} r_t d_t`; 'adapted',
        :math:`r_t d_t`, where the learning rate multiplies the sum; or 'gradients', :math:`d_t`,
        where rate and ratio multiply the sum. The denominator 'momentum' requires 'gradients'.
      nesterov: whether to step along :math:`\mu b_t` plus the summand of update t, not along :math:`b_t`.
      dampening: each summand is multiplied by 1 - dampening, in [0, 1). If `dampening` equals
        `momentum`, the sum is the running mean of the LAMB paper's Algorithm 1.
      dampen_first: whether the first summand is dampened too; False in PyTorch's SGD.
      l2_in_loss: whether the gradient already contains :math:`\lambda w`. If so, the decay is not
        added, and `weight_decay` only enters the ratio. Requires the denominator 'gradient'.
      trust_clip: whether the learning rate of a layer is :math:`\min(r_t, \eta_{t-1})`, as in LARC,
        instead of :math:`\eta_{t-1} r_t`.
      skip_zero: whether a layer is updated by plain momentum if its weights or its gradient are all
        0: with the ratio `zero_ratio`, without decay and without clip, as in NVIDIA's LARC. If
        False, only the ratio of such a layer is special. Requires the denominator 'gradient'.
      norm: 'l2', 'l1' or 'linf'; the paper uses l2.
      phi_bounds: the bounds of :math:`\phi`, which is the identity by default.
      zero_ratio: the ratio of a layer if its weights, or the tensor in the denominator, are all 0.
      collect: with `trust_clip` the stored ratio is the clipped ratio,
        :math:`\min(r_t / \eta_{t-1}, 1)`.

    Raises:
      ValueError: two arguments are incompatible. For other errors, see `lamb_tpu.optim`.

    References:
      You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, arXiv:1708.03888.
      You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, Algorithm 1.
    """
    given = checks.checked(lars, locals())
    checks.check_choices(
        norm=(norm, trust_ratio.NORMS),
        denominator=(denominator, DENOMINATORS),
        accumulate=(accumulate, ACCUMULATES),
    )
    if denominator == "momentum" and accumulate != "gradients":
        raise ValueError(
            f"accumulate={accumulate!r} must be 'gradients' with denominator='momentum', because "
            "the ratio depends on the momentum"
        )
    for name, flag in (("l2_in_loss", l2_in_loss), ("skip_zero", skip_zero)):
        if flag and denominator != "gradient":
            raise ValueError(f"denominator={denominator!r} must be 'gradient' with {name}=True")
    heavy_ball = Momentum(**given)
    ratio = LayerRatio(norm, coefficient, eps, phi_bounds, zero_ratio=zero_ratio)
    step = _Step(**given | {"momentum": heavy_ball, "ratio": ratio})
    return leafwise.transform(LarsState, heavy_ball.init_leaf, step, **leafwise.common(given))


class _Step(leafwise.Arguments):
    def __call__(self, leaf: Leaf, buffer: jax.Array) -> Step:
        metadata = leaf.metadata
        decay: float | jax.Array = 0.0
        if metadata.decay:
            decay = leafwise.decay_of(leaf, self.weight_decay)
        # The denominator decides when the ratio can be computed: from the raw gradient, from the
        # gradient plus decay, or from the momentum's direction.
        ratio = None
        if metadata.adapt and self.denominator == "gradient":
            ratio, nonzero = self.layer_ratio(leaf, leaf.grad, decay)
            # LARC adds no decay to a layer with a zero gradient, although its weights may be
            # nonzero.
            if self.skip_zero:
                decay = jnp.where(nonzero, decay, 0.0)
        summand = leaf.grad
        if metadata.decay and not self.l2_in_loss:
            summand = summand + decay * leaf.weights
        if metadata.adapt and self.denominator == "decayed":
            ratio, _ = self.layer_ratio(leaf, summand, 0.0)

        # `accumulate` selects which factors multiply the summand, and so enter the momentum. The
        # others multiply the direction below.
        if self.accumulate == "steps":
            summand = _scaled(leaf.rate, ratio) * summand
        elif self.accumulate == "adapted":
            summand = _scaled(1.0, ratio) * summand
        direction, buffer = self.momentum.step(leaf, buffer, summand)

        if metadata.adapt and self.denominator == "momentum":
            ratio, _ = self.layer_ratio(leaf, direction, 0.0)
        if self.accumulate == "adapted":
            direction = leaf.rate * direction
        elif self.accumulate == "gradients":
            direction = _scaled(leaf.rate, ratio) * direction
        return -direction, (buffer,), ratio

    def layer_ratio(
        self, leaf: Leaf, divisor: jax.Array, decay: float | jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns each layer's ratio, and whether the norms of its weights and divisor are both nonzero."""
        weights, divided = (
            trust_ratio.leaf_norm(x, leaf.metadata, self.ratio.norm, leaf.axis_name)
            for x in (leaf.weights, divisor)
        )
        # One flag per layer, in the norms' shape: size 1 along all axes that do not stack layers.
        nonzero = (weights > 0) & (divided > 0)
        ratio = self.ratio.of_norms(weights, divided, decay)
        if self.trust_clip:
            # Express min(ratio, rate) as a factor of the rate, without a division by a rate of 0.
            factor = ratio / jnp.where(leaf.rate > 0, leaf.rate, 1.0)
            factor = jnp.where(ratio >= leaf.rate, 1.0, factor)
            # LARC leaves a layer of zeros to the base optimizer, so do not clip its rate either.
            ratio = jnp.where(nonzero, factor, ratio) if self.skip_zero else factor
        return ratio, nonzero


def _scaled(factor: Any, ratio: jax.Array | None) -> Any:
    return factor if ratio is None else factor * ratio
