r"""LARS: momentum SGD in which each layer has a step length of its own.

What is published under this name differs in four choices, which are the arguments of `lars`: what
the ratio divides by, what the momentum accumulates, where the weight decay goes, and how a ratio
is bounded. Learning rates do not carry over from one form to another. `presets.PRESETS['lars']`
has the arguments of each published form, as in `lars(rate, **presets.preset('lars', 'larc'))`.
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
from lamb_tpu.optim.trust_ratio import AxisName, Readings

DENOMINATORS = ("gradient", "decayed", "momentum")
ACCUMULATES = ("steps", "adapted", "gradients")


class LarsState(NamedTuple):
    """State of `lars`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    momentum: Any  # the parameters' shapes; float32 unless `momentum_dtype` says otherwise
    readings: Readings | None


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
    r"""LARS; by default that of 2017, as it runs in TPU ResNet and EfficientNet code.

    .. math::
      d_t &= g_t + \lambda w_{t-1} \\
      r_t &= c \frac{\phi(\|w_{t-1}\|)}{\|g_t\| + \lambda \|w_{t-1}\| + \epsilon} \\
      b_t &= \mu b_{t-1} + \eta_{t-1} r_t d_t, \qquad w_t = w_{t-1} - b_t

    for each layer on its own, with the learning rate :math:`\eta_{t-1}`. The momentum holds steps,
    so one that was taken at a high rate keeps its length after the rate falls. A leaf that does
    not adapt has :math:`r = 1`: momentum SGD; one that does not decay has :math:`\lambda = 0`.

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
      learning_rate: a number, or a schedule of the count of completed updates. With the
        coefficient of 0.001 the recipes' peaks lie near 10 to 36.
      momentum: :math:`\mu`, in [0, 1); 0.9 in the paper.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates; 1e-4
        in the authors' ResNet-50 solver.
      coefficient: :math:`c`, the trust coefficient; 0.001 in the TPU code and the authors' Caffe.
      eps: :math:`\epsilon`; 0 in the TPU code.
      denominator: what the ratio divides by: 'gradient', the norm of the raw gradient plus that of
        the decay, as above; 'decayed', :math:`\|d_t\| + \epsilon`; 'momentum',
        :math:`\|u_t\| + \epsilon` with the direction :math:`u_t` that the momentum gives.
      accumulate: what the momentum sums up: 'steps', :math:`\eta_{t-1} r_t d_t`; 'adapted',
        :math:`r_t d_t`, and the learning rate multiplies the sum; 'gradients', :math:`d_t`, and
        both multiply the sum, which 'momentum' as the denominator needs.
      nesterov: step along :math:`\mu b_t` plus this update's own summand, not along :math:`b_t`.
      dampening: each summand is multiplied by 1 - dampening, in [0, 1). Equal to `momentum` it
        makes the sum the running mean of the LAMB paper's Algorithm 1.
      dampen_first: False leaves the first summand whole, as PyTorch's SGD does.
      l2_in_loss: the gradient given holds :math:`\lambda w` already, so that none is added to it
        and `weight_decay` is in the ratio alone. Needs the denominator 'gradient'.
      trust_clip: LARC: a layer's learning rate is :math:`\min(r_t, \eta_{t-1})` instead of
        :math:`\eta_{t-1} r_t`.
      skip_zero: a layer of which the weights or the gradient are all 0 is left to plain momentum
        with the ratio `zero_ratio`: no decay and no clip, as in NVIDIA's LARC. By default only its
        ratio differs. Needs the denominator 'gradient'.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`.
      norm: 'l2', 'l1' or 'linf'; the paper uses l2.
      phi_bounds: the bounds of :math:`\phi`; by default it is the identity.
      zero_ratio: the ratio of a layer of which the weights, or what `denominator` names, are all 0.
      clip_global_norm: the norm of all gradients together above which they are scaled down to it
        before anything else; None for no clipping.
      momentum_dtype: the dtype in which the momentum is kept, for example bfloat16; None for
        float32 (float64 for float64 leaves). Arithmetic is in float32 either way.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      collect: keep each layer's trust ratio and norms in the state, see `readings.read`. With
        `trust_clip` the ratio is the clipped one, :math:`\min(r_t / \eta_{t-1}, 1)`.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range, or two that exclude each other, naming it.

    References:
      You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, arXiv:1708.03888.
      You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, Algorithm 1.
    """
    heavy_ball = Momentum(momentum, nesterov, dampening, dampen_first, momentum_dtype)
    checks.check_schedule("weight_decay", weight_decay)
    trust_ratio.check(
        norm, phi_bounds, {"coefficient": coefficient, "eps": eps, "zero_ratio": zero_ratio}
    )
    checks.check_choice("denominator", denominator, DENOMINATORS)
    checks.check_choice("accumulate", accumulate, ACCUMULATES)
    for name, flag in (
        ("l2_in_loss", l2_in_loss),
        ("trust_clip", trust_clip),
        ("skip_zero", skip_zero),
    ):
        checks.check_flag(name, flag)
    if denominator == "momentum" and accumulate != "gradients":
        raise ValueError(
            "denominator 'momentum' needs accumulate 'gradients', as the ratio is known only after "
            f"the momentum: not {accumulate!r}"
        )
    for name, flag in (("l2_in_loss", l2_in_loss), ("skip_zero", skip_zero)):
        if flag and denominator != "gradient":
            raise ValueError(f"{name} needs denominator 'gradient', not {denominator!r}")

    def layer_ratio(
        leaf: Leaf, divisor: jax.Array, decay: float | jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The ratio of each layer, and whether neither of its norms is 0."""
        weight_norm = trust_ratio.leaf_norm(leaf.weights, leaf.facts, norm, leaf.axis_name)
        divisor_norm = trust_ratio.leaf_norm(divisor, leaf.facts, norm, leaf.axis_name)
        # Per layer, of the norms' shape: size 1 along all axes that stack no layers.
        nonzero = (weight_norm > 0) & (divisor_norm > 0)
        ratio = trust_ratio.trust_ratio(
            weight_norm,
            divisor_norm,
            coefficient=coefficient,
            eps=eps,
            decay=decay,
            phi_bounds=phi_bounds,
            zero_ratio=zero_ratio,
        )
        if trust_clip:
            # As a factor of the rate, so that all else stays; at the rate 0 nothing divides by it.
            factor = ratio / jnp.where(leaf.rate > 0, leaf.rate, 1.0)
            factor = jnp.where(ratio >= leaf.rate, 1.0, factor)
            # LARC leaves a layer of zeros to the base optimizer, so its rate is not clipped either.
            ratio = jnp.where(nonzero, factor, ratio) if skip_zero else factor
        return ratio, nonzero

    def scaled(factor: Any, ratio: jax.Array | None) -> Any:
        return factor if ratio is None else factor * ratio

    def step_leaf(leaf: Leaf, buffer: jax.Array) -> Step:
        facts = leaf.facts
        decay: float | jax.Array = 0.0
        if facts.decay:
            decay = leafwise.decay_at(weight_decay, facts, leaf.completed, leaf.rate.dtype)
        # The ratio becomes known at one of three places, by its denominator: from the raw gradient,
        # from the gradient with the decay added, or from the momentum's direction.
        ratio = None
        if facts.adapt and denominator == "gradient":
            ratio, nonzero = layer_ratio(leaf, leaf.grad, decay)
            # LARC adds no decay to such a layer either; its other norm may well not be 0.
            if skip_zero:
                decay = jnp.where(nonzero, decay, 0.0)
        summand = leaf.grad
        if facts.decay and not l2_in_loss:
            summand = summand + decay * leaf.weights
        if facts.adapt and denominator == "decayed":
            ratio, _ = layer_ratio(leaf, summand, 0.0)

        # The momentum holds the factors of the summand; those that are left multiply the direction
        # that comes out of it.
        if accumulate == "steps":
            summand = scaled(leaf.rate, ratio) * summand
        elif accumulate == "adapted":
            summand = scaled(1.0, ratio) * summand
        direction, buffer = heavy_ball.step(leaf, buffer, summand)

        if facts.adapt and denominator == "momentum":
            ratio, _ = layer_ratio(leaf, direction, 0.0)
        if accumulate == "adapted":
            direction = leaf.rate * direction
        elif accumulate == "gradients":
            direction = scaled(leaf.rate, ratio) * direction
        return -direction, (buffer,), ratio

    return leafwise.transform(
        LarsState,
        heavy_ball.init_leaf,
        step_leaf,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        axis_name=axis_name,
        collect=collect,
    )
