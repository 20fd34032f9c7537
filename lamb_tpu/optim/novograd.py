r"""NovoGrad: momentum SGD with gradients divided by a moving RMS of their layer's norm.

Published implementations of NovoGrad differ in a few choices, which are the arguments of
`novograd`. `presets.PRESETS['novograd']` has the arguments that reproduce each implementation, for
example `novograd(rate, **presets.preset('novograd', 'apex'))`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics

NORMS = ("l2", "linf")
AVERAGINGS = ("none", "all", "after_first")
NORMALISES = ("gradient", "momentum")
DECAYS = ("momentum", "decoupled")


class NovogradState(NamedTuple):
    """State of `novograd`.

    `nu` and `nu_max` hold one number per layer, float32 unless nu_dtype is given. The arrays have
    size 1 along all axes that do not stack layers.
    """

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # the momentum: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments, or with 'linf' averages of norms; None if a leaf does not adapt
    nu_max: Any  # the largest `nu` so far; None for every leaf without `amsgrad`
    diagnostics: Diagnostics | None


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
    r"""The NovoGrad optimizer; by default the paper's form.

    .. math::
      v_1 &= \|g_1\|^2, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \|g_t\|^2 \\
      m_t &= \beta_1 m_{t-1} + \frac{g_t}{\sqrt{v_t} + \epsilon} + \lambda w_{t-1} \\
      w_t &= w_{t-1} - \eta_{t-1} m_t

    for each layer separately, so the second moment is one number per layer. The average starts with
    the first nonzero gradient of the layer, not with the first update. Otherwise, if the first
    gradients of a layer were 0, the layer's first step would be too long by the factor
    :math:`1 / \sqrt{1 - \beta_2}`, which is 7. Until the first nonzero gradient, the divisor is 1.

    A leaf that does not adapt has the divisor 1, which is momentum SGD. A leaf that does not decay
    has :math:`\lambda = 0`.

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
      learning_rate: :math:`\eta`. `lamb_tpu.optim` describes all arguments that are not listed
        here.
      b1: :math:`\beta_1`, in [0, 1). The defaults of b1, b2 and eps are the authors' values.
      b2: :math:`\beta_2`, in [0, 1). With 0, only the newest gradient's norm matters.
      eps: :math:`\epsilon`, outside the root. The authors' code has an eps inside, see `eps_root`.
      weight_decay: :math:`\lambda`.
      grad_averaging: 'none', as above; 'all' multiplies each summand of the momentum, including the
        decay, by :math:`1 - \beta_1`; 'after_first' does the same except at the first update, as in
        TensorFlow Addons.
      normalise: 'gradient', as above; 'momentum' accumulates raw gradients and divides the momentum
        instead, as by default in apex.
      decay: 'momentum', as above; 'decoupled' subtracts :math:`\eta_{t-1} \lambda w_{t-1}` from the
        weights instead.
      lr_in_momentum: whether the momentum accumulates steps that include the rate, so that a step
        taken at a high rate keeps its length after the rate falls; False in the authors' code.
      bias_correction: whether to divide the momentum by :math:`1 - \beta_1^t` and the norm by
        :math:`\sqrt{1 - \beta_2^t}`. Use this with `init_zero`: otherwise the norm is not biased, and
        the correction makes the norm too large and early steps too short.
      init_zero: whether the average of the second moment starts at 0 instead of at the first
        gradient.
      amsgrad: whether to divide by the root of the largest second moment so far.
      eps_root: added to the second moment inside the root.
      norm: 'l2' or 'linf'. With 'linf', :math:`v` is the average of the norms instead of their
        squares.
      nu_dtype: the dtype of second moments. PyTorch implementations use float32 even for float64
        parameters.
      collect: the stored ratio is the factor of the gradient, :math:`1 / (\sqrt{v_t} + \epsilon)`.

    Raises:
      ValueError: two arguments are incompatible. For other errors, see `lamb_tpu.optim`.

    References:
      Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of
      Deep Networks, arXiv:1905.11286, with its code in NVIDIA's OpenSeq2Seq.
    """
    given = checks.checked(novograd, locals())
    checks.check_choices(
        grad_averaging=(grad_averaging, AVERAGINGS),
        normalise=(normalise, NORMALISES),
        decay=(decay, DECAYS),
        norm=(norm, NORMS),
    )
    if normalise == "momentum" and decay == "momentum":
        raise ValueError(
            f"decay={decay!r} must be 'decoupled' with normalise='momentum', because decay in the "
            "momentum would be divided by the norm of the gradients"
        )
    step = _Step(**given)
    return leafwise.transform(NovogradState, step.init_leaf, step, **leafwise.common(given))


class _Step(leafwise.Arguments):
    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[Any, ...]:
        mu = leafwise.zeros_like(param, self.mu_dtype)
        if not metadata.adapt:
            return mu, None, None
        # `leaf_norm` returns an array with the shape and the sharding that the buffer must have.
        norm = trust_ratio.leaf_norm(param, metadata, axis_name=split.axis_name)
        nu = jnp.zeros_like(norm, dtype=self.nu_dtype)
        # Copy: a state that contains an array twice cannot be donated.
        return mu, nu, jnp.copy(nu) if self.amsgrad else None

    def __call__(self, leaf: Leaf, mu: jax.Array, nu: Any, nu_max: Any) -> Step:
        metadata, completed, rate = leaf.metadata, leaf.completed, leaf.rate
        decayed = leafwise.decay_of(leaf, self.weight_decay) * leaf.weights

        ratio = None
        if metadata.adapt:
            nu = self.second_moment(leaf, nu)
            if self.amsgrad:
                nu_max = jnp.maximum(nu_max, nu)
            ratio = self.factor(nu_max if self.amsgrad else nu, leaf)

        # m_t: the normalised gradient and the decay.
        summand = leaf.grad
        if ratio is not None and self.normalise == "gradient":
            summand = ratio * summand
        if metadata.decay and self.decay == "momentum":
            summand = summand + decayed
        if self.grad_averaging == "all":
            summand = (1 - self.b1) * summand
        elif self.grad_averaging == "after_first":
            summand = jnp.where(completed == 0, 1.0, 1 - self.b1).astype(rate.dtype) * summand
        if self.lr_in_momentum:
            summand = rate * summand
        total = self.b1 * mu.astype(leaf.weights.dtype) + summand

        # Factors that are not in the momentum multiply the direction.
        direction = total
        if self.bias_correction:
            direction = direction / leafwise.correction(leaf, self.b1)
        if ratio is not None and self.normalise == "momentum":
            direction = ratio * direction
        if not self.lr_in_momentum:
            direction = rate * direction
        if metadata.decay and self.decay == "decoupled":
            direction = direction + rate * decayed
        return -direction, (total.astype(mu.dtype), nu, nu_max), ratio

    def second_moment(self, leaf: Leaf, nu: jax.Array) -> jax.Array:
        """Returns the new second moment of each layer, in the shape of the norms."""
        newest = trust_ratio.leaf_norm(leaf.grad, leaf.metadata, self.norm, leaf.axis_name)
        if self.norm == "l2":
            newest = newest * newest
        average = self.b2 * leafwise.widen(nu) + (1 - self.b2) * newest
        # nu stays 0 until the layer has a nonzero gradient.
        return (average if self.init_zero else jnp.where(nu == 0, newest, average)).astype(nu.dtype)

    def factor(self, nu: jax.Array, leaf: Leaf) -> jax.Array:
        """Returns the factor of each layer's gradient: 1 until the layer's first nonzero gradient."""
        nu = leafwise.widen(nu)
        # With 'l2', nu is the average of squared norms. With 'linf', nu is the average of norms and
        # must be squared before eps_root is added; hypot does this without overflow.
        if self.norm == "l2":
            root = trust_ratio.root(nu + self.eps_root)
        else:
            # Avoid hypot at nu = 0, where its derivative may be NaN. The last line ignores this
            # value.
            root = jnp.hypot(jnp.where(nu == 0, 1.0, nu), jnp.sqrt(self.eps_root))
        if self.bias_correction:
            root = root / jnp.sqrt(one_minus_power(self.b2, leaf.count, nu.dtype))
        return 1 / jnp.where(nu == 0, 1.0, root + self.eps).astype(leaf.rate.dtype)
