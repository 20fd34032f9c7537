r"""RMSProp as TensorFlow has it, with which EfficientNet is trained."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Readings

DECAYS = ("gradient", "decoupled")


class RmspropTfState(NamedTuple):
    """State of `rmsprop_tf`: each field a tree of the parameters' shapes, float32 by default."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    nu: Any  # second moments
    mean: Any  # first moments; None for every leaf unless `centered`
    momentum: Any  # None for every leaf where the momentum is 0
    readings: Readings | None


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
    r"""RMSProp; by default the one of EfficientNet's code in TensorFlow.

    .. math::
      v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad v_0 = 1 \\
      b_t &= \mu b_{t-1} + \eta_{t-1} \frac{g_t}{\sqrt{v_t + \epsilon}}, \quad
      w_t = w_{t-1} - b_t

    element by element. Because :math:`v` starts at 1 and :math:`\epsilon` is large and inside the
    root, first steps are shorter than those of other forms of RMSProp, whose learning rates do not
    carry over. The momentum holds steps: one that was taken at a high rate keeps its length after
    the rate falls. There is no trust ratio, so whether a leaf adapts changes nothing. Arithmetic is
    in float32 (float64 for float64 leaves).

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
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates; 0.016
        for 256 examples in EfficientNet's code.
      b2: :math:`\beta_2`, `decay` in TensorFlow, in [0, 1); 0.9, as the next two in EfficientNet's
        code.
      momentum: :math:`\mu`, in [0, 1); 0.9. With the number 0 no momentum is kept.
      eps: :math:`\epsilon`; 1e-3.
      initial_scale: :math:`v_0`; 1 in TensorFlow 1, 0 in Keras, PyTorch and by default in Optax.
      eps_in_root: False for :math:`\sqrt{v_t} + \epsilon`.
      centered: subtract the square of the moving mean of gradients, which starts at 0, from
        :math:`v_t`.
      bias_correction: divide both moving averages by :math:`1 - \beta_2^t`, for `initial_scale` 0.
      lr_in_momentum: False keeps the learning rate out of the momentum and multiplies the sum.
      nesterov: step along :math:`\mu b_t` plus this update's own summand, not along :math:`b_t`.
      cautious: only the elements of the step that have the sign of the gradient are kept, divided
        by the fraction of a layer's elements that are kept, or by 0.001 if that is more, as in
        timm. Complex leaves have no signs, so they are refused.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates.
        EfficientNet's code adds half of 1e-5 times the squares of all but BatchNorm's parameters
        to the loss, which is a weight decay of 1e-5 in the gradient.
      decay: 'gradient' adds :math:`\lambda w_{t-1}` to the gradient before anything but clipping;
        'decoupled' takes :math:`\eta_{t-1} \lambda w_{t-1}` off the weights instead.
      rules: which leaves decay, which axes stack layers, see `parameters.resolve`.
      clip_global_norm: the l2 norm of all gradients together above which they are scaled down to
        it before anything else; None for no clipping.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, for
        clipping, `cautious` and `collect`, see `trust_ratio.scale_by_trust_ratio`; None under
        `jit`.
      momentum_dtype: the dtype in which the momentum is kept; by default that of the arithmetic.
      nu_dtype: the same for second moments.
      collect: keep each layer's norms in the state, see `readings.read`.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range or no choice, naming it.

    References:
      Wongpanich et al., Training EfficientNets at Supercomputer Scale, arXiv:2011.00071, for the
      recipe; models/official/efficientnet/utils.py of tensorflow/tpu for the numbers.
    """
    for name, value in (("b2", b2), ("momentum", momentum)):
        checks.check_range(name, value, upper=1.0)
    for name, value in (("eps", eps), ("initial_scale", initial_scale)):
        checks.check_range(name, value)
    checks.check_schedule("weight_decay", weight_decay)
    checks.check_choice("decay", decay, DECAYS)
    for name, flag in (
        ("eps_in_root", eps_in_root),
        ("centered", centered),
        ("bias_correction", bias_correction),
        ("lr_in_momentum", lr_in_momentum),
        ("nesterov", nesterov),
        ("cautious", cautious),
    ):
        checks.check_flag(name, flag)
    checks.check_dtype("momentum_dtype", momentum_dtype)
    checks.check_dtype("nu_dtype", nu_dtype, squares=True)
    # Under `optax.inject_hyperparams` the momentum is an array and may change during a run.
    keeps_momentum = isinstance(momentum, jax.Array) or momentum != 0

    def init_leaf(param: jax.Array, facts: ParameterFacts, split: Split) -> tuple[Any, ...]:
        del facts, split
        nu = leafwise.zero_squares(param, nu_dtype)
        mean = leafwise.zeros_like(param) if centered else None
        buffer = leafwise.zeros_like(param, momentum_dtype) if keeps_momentum else None
        return jnp.full_like(nu, initial_scale), mean, buffer

    def average(old: jax.Array, sample: jax.Array) -> jax.Array:
        return (b2 * old.astype(sample.dtype) + (1 - b2) * sample).astype(old.dtype)

    def step_leaf(leaf: Leaf, nu: jax.Array, mean: Any, buffer: Any) -> Step:
        grad, weights, facts = leaf.grad, leaf.weights, leaf.facts
        rate, completed = leaf.rate, leaf.completed
        dtype, real = weights.dtype, rate.dtype
        decayed = leafwise.decay_at(weight_decay, facts, completed, real) * weights
        if facts.decay and decay == "gradient":
            grad = grad + decayed
        correction: float | jax.Array = 1.0
        if bias_correction:
            correction = 1 / one_minus_power(b2, leaf.count, real)

        # The second moment v_t, and with `centered` the variance.
        nu = average(nu, trust_ratio.real_product(grad, grad))
        square = correction * nu.astype(real)
        if centered:
            mean = average(mean, grad)
            # Rounding can take the difference, a variance, below 0.
            center = correction * mean
            square = jnp.maximum(square - trust_ratio.real_product(center, center), 0.0)
        root = trust_ratio.root
        summand = grad / (root(square + eps) if eps_in_root else root(square) + eps)

        # The momentum b_t. With the rate inside, it holds steps.
        if lr_in_momentum:
            summand = rate * summand
        step = summand
        if keeps_momentum:
            total = momentum * buffer.astype(dtype) + summand
            buffer = total.astype(buffer.dtype)
            step = momentum * total + summand if nesterov else total
        # Elements whose step goes against their gradient are left out. The others grow by the
        # inverse of the share that is kept, as timm has it, at most a thousandfold.
        if cautious:
            kept = (step * grad > 0).astype(dtype)
            share = trust_ratio.leaf_mean(kept, facts, leaf.axis_name)
            step = step * (kept / jnp.maximum(share, 1e-3))
        if not lr_in_momentum:
            step = rate * step
        # Outside the momentum and the mask: the weights shrink by the rate of this update.
        if facts.decay and decay == "decoupled":
            step = step + rate * decayed
        return -step, (nu, mean, buffer), None

    return leafwise.transform(
        RmspropTfState,
        init_leaf,
        step_leaf,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        axis_name=axis_name,
        collect=collect,
        real_only="cautious" if cautious else None,
    )
