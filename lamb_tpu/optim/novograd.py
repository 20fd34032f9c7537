r"""NovoGrad: momentum SGD on gradients that each layer divides by a moving norm of its own.

What is published under this name differs in a few choices, which are the arguments of `novograd`.
`presets.PRESETS['novograd']` has those of each published form, as in
`novograd(rate, **presets.preset('novograd', 'apex'))`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Readings

NORMS = ("l2", "linf")
AVERAGINGS = ("none", "all", "after_first")
NORMALISES = ("gradient", "momentum")
DECAYS = ("momentum", "decoupled")


class NovogradState(NamedTuple):
    """State of `novograd`.

    `nu` and `nu_max` hold one number for each layer, float32 unless nu_dtype is given: arrays of
    size 1 along all axes that stack no layers.
    """

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # the momentum: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments, of 'linf' moving averages of norms; None where a leaf does not adapt
    nu_max: Any  # the largest `nu` so far; None for every leaf without `amsgrad`
    readings: Readings | None


def novograd(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    b2: float = 0.98,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    grad_averaging: str = "none",
    normalise: str = "gradient",
    decay: str = "momentum",
    lr_in_momentum: bool = False,
    bias_correction: bool = False,
    init_zero: bool = False,
    amsgrad: bool = False,
    eps_root: float = 0.0,
    norm: str = "l2",
    rules: Rules = parameters.DEFAULT_RULES,
    clip_global_norm: float | None = None,
    axis_name: AxisName = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""NovoGrad; by default that of the paper.

    .. math::
      v_1 &= \|g_1\|^2, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \|g_t\|^2 \\
      m_t &= \beta_1 m_{t-1} + \frac{g_t}{\sqrt{v_t} + \epsilon} + \lambda w_{t-1} \\
      w_t &= w_{t-1} - \eta_{t-1} m_t

    for each layer on its own, so the second moment is one number for a layer. Its average starts
    with the first gradient of the layer that is not all 0, not with the first update: a layer that
    lies still at first would otherwise take a first step that is :math:`1 / \sqrt{1 - \beta_2}`,
    or 7 times, too long. Until then its gradient, of zeros, is divided by 1.

    A leaf that does not adapt has its gradient divided by 1 as well: momentum SGD. One that does
    not decay has :math:`\lambda = 0`. Arithmetic is in float32 (float64 for float64 leaves).

    >>> import jax.numpy as jnp
    >>> from lamb_tpu.optim.presets import preset
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> def two_steps(**arguments):
    ...     tx = novograd(0.1, **arguments)
    ...     state, steps = tx.init(params), []
    ...     for scale in (1, 2):
    ...         updates, state = tx.update({'kernel': scale * jnp.array([0., 2.])}, state, params)
    ...         steps.append(round(float(updates['kernel'][1]), 4))
    ...     return steps, round(float(state.nu['kernel'][0]), 4)
    >>> two_steps()  # 0.1 * 2 / 2, then 0.1 * (0.95 + 4 / sqrt(0.98 * 4 + 0.02 * 16))
    ([-0.1, -0.2893], 4.24)
    >>> two_steps(**preset('novograd', 'apex'))
    ([-0.0032, -0.0068], 4.012)

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates.
      b1: :math:`\beta_1`, in [0, 1); 0.95 in the authors' code, as the other defaults are.
      b2: :math:`\beta_2`, in [0, 1); 0.98. 0 takes the norm of the last gradient alone.
      eps: :math:`\epsilon`, outside the root; 1e-8, which the authors' code has inside it: see
        `eps_root`.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates; 0.
      grad_averaging: 'all' multiplies what is added to the momentum, decay included, by
        :math:`1 - \beta_1`; 'after_first' leaves it whole at the first update, as TensorFlow
        Addons does.
      normalise: 'gradient', as above; 'momentum' puts the raw gradient into the momentum and
        divides that instead, which is apex's default.
      decay: 'momentum', as above; 'decoupled' leaves the decay out of it and takes
        :math:`\eta_{t-1} \lambda w_{t-1}` off the weights.
      lr_in_momentum: the momentum holds steps, so one that was taken at a high rate keeps its
        length after the rate falls; False in the authors' code.
      bias_correction: divide the momentum by :math:`1 - \beta_1^t` and the norm by
        :math:`\sqrt{1 - \beta_2^t}`. Meant for `init_zero`: a norm that starts as the first one
        becomes too large by it, and early steps too short.
      init_zero: start the average of the second moment at 0, not at the first gradient.
      amsgrad: divide by the largest second moment so far.
      eps_root: added to the second moment inside the root.
      norm: 'l2', or 'linf', with which :math:`v` is the average of the norms themselves.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`.
      clip_global_norm: the l2 norm of all gradients together above which they are scaled down to
        it before anything else; None for no clipping.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      mu_dtype: the dtype in which the momentum is kept; by default that of the arithmetic.
      nu_dtype: the dtype in which second moments are kept, and divided by: the implementations in
        PyTorch have float32 for float64 parameters too.
      collect: keep each layer's ratio and norms in the state, see `readings.read`. The ratio is
        what the gradient is multiplied by, :math:`1 / (\sqrt{v_t} + \epsilon)`.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes.

    Raises:
      ValueError: for an argument that is out of range or no choice, or two that exclude each
        other, naming it.

    References:
      Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of
      Deep Networks, arXiv:1905.11286, with its code in NVIDIA's OpenSeq2Seq.
    """
    checks.check_range("b1", b1, upper=1.0)
    checks.check_range("b2", b2, upper=1.0)
    checks.check_range("eps", eps)
    checks.check_range("eps_root", eps_root)
    checks.check_schedule("weight_decay", weight_decay)
    for name, value, choices in (
        ("grad_averaging", grad_averaging, AVERAGINGS),
        ("normalise", normalise, NORMALISES),
        ("decay", decay, DECAYS),
        ("norm", norm, NORMS),
    ):
        checks.check_choice(name, value, choices)
    for name, flag in (
        ("lr_in_momentum", lr_in_momentum),
        ("bias_correction", bias_correction),
        ("init_zero", init_zero),
        ("amsgrad", amsgrad),
    ):
        checks.check_flag(name, flag)
    if normalise == "momentum" and decay == "momentum":
        raise ValueError(
            "normalise 'momentum' needs decay 'decoupled', since decay in the momentum would be "
            f"divided by the norm of the gradients: not {decay!r}"
        )
    checks.check_dtype("mu_dtype", mu_dtype)
    checks.check_dtype("nu_dtype", nu_dtype, squares=True)

    def init_leaf(param: jax.Array, facts: ParameterFacts, split: Split) -> tuple[Any, ...]:
        mu = leafwise.zeros_like(param, mu_dtype)
        if not facts.adapt:
            return mu, None, None
        # The norm gives its shape, and on a mesh its place.
        norm = trust_ratio.leaf_norm(param, facts, axis_name=split.axis_name)
        nu = jnp.zeros_like(norm, dtype=nu_dtype)
        # Two arrays: a state in which one stands twice cannot be donated.
        return mu, nu, jnp.copy(nu) if amsgrad else None

    def second_moment(leaf: Leaf, nu: jax.Array) -> jax.Array:
        # One number for each layer, of the norms' shape.
        newest = trust_ratio.leaf_norm(leaf.grad, leaf.facts, norm, leaf.axis_name)
        if norm == "l2":
            newest = newest * newest
        average = b2 * leafwise.widen(nu) + (1 - b2) * newest
        # nu is 0 for as long as all gradients of the layer have been 0.
        return (average if init_zero else jnp.where(nu == 0, newest, average)).astype(nu.dtype)

    def factor(nu: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
        """The factor of each layer's gradient; 1 while its gradients have all been 0."""
        nu = leafwise.widen(nu)
        # With 'l2' nu is a squared norm. With 'linf' it is a norm, which has to be squared before
        # eps_root is added: hypot does that without overflow.
        if norm == "l2":
            root = trust_ratio.root(nu + eps_root)
        else:
            # At 0 it is left out below, and its derivative may be NaN.
            root = jnp.hypot(jnp.where(nu == 0, 1.0, nu), jnp.sqrt(eps_root))
        if bias_correction:
            root = root / jnp.sqrt(one_minus_power(b2, count, nu.dtype))
        return 1 / jnp.where(nu == 0, 1.0, root + eps).astype(dtype)

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: Any, nu_max: Any) -> Step:
        grad, weights, facts = leaf.grad, leaf.weights, leaf.facts
        rate, completed, count = leaf.rate, leaf.completed, leaf.count
        dtype, real = weights.dtype, rate.dtype
        # The step: v_t and the factor of the gradient, then m_t, then w_t.
        decayed = leafwise.decay_at(weight_decay, facts, completed, real) * weights

        ratio = None
        if facts.adapt:
            nu = second_moment(leaf, nu)
            if amsgrad:
                nu_max = jnp.maximum(nu_max, nu)
            ratio = factor(nu_max if amsgrad else nu, count, real)

        # m_t: the normalised gradient and the decay.
        summand = grad
        if ratio is not None and normalise == "gradient":
            summand = ratio * summand
        if facts.decay and decay == "momentum":
            summand = summand + decayed
        if grad_averaging == "all":
            summand = (1 - b1) * summand
        elif grad_averaging == "after_first":
            summand = jnp.where(completed == 0, 1.0, 1 - b1).astype(real) * summand
        if lr_in_momentum:
            summand = rate * summand
        total = b1 * mu.astype(dtype) + summand

        # Everything that is not in the momentum multiplies what comes out of it.
        direction = total
        if bias_correction:
            direction = direction / one_minus_power(b1, count, real)
        if ratio is not None and normalise == "momentum":
            direction = ratio * direction
        if not lr_in_momentum:
            direction = rate * direction
        if facts.decay and decay == "decoupled":
            direction = direction + rate * decayed
        return -direction, (total.astype(mu.dtype), nu, nu_max), ratio

    return leafwise.transform(
        NovogradState,
        init_leaf,
        step_leaf,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        axis_name=axis_name,
        collect=collect,
    )
