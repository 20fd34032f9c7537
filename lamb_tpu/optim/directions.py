r"""LAMB's and LARS's directions as links of a chain, without rate, decay and trust ratio.

The other links are `chains.add_decayed_weights`, `trust_ratio.scale_by_trust_ratio` and
`optax.scale_by_learning_rate`. `lamb` and `lars` are made of the same functions of one leaf.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName

BIAS_CORRECTIONS = ("moments", "none")
NESTEROVS = ("none", "first", "both")


class ScaleByLambState(NamedTuple):
    """State of `scale_by_lamb`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32 unless mu_dtype is given
    nu: Any  # second moments: the parameters' shapes, float32 unless nu_dtype is given


class ScaleByLarsState(NamedTuple):
    """State of `scale_by_lars`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    momentum: Any  # the parameters' shapes; float32 unless `momentum_dtype` says otherwise


def scale_by_lamb(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    bias_correction: str = "moments",
    eps_root: float = 0.0,
    grad_averaging: bool = True,
    nesterov: str = "none",
    cautious: bool = False,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB's direction, :math:`\hat m_t / (\sqrt{\hat v_t + \epsilon_r} + \epsilon)`.

    This is the first of LAMB's four links, and alone it is Adam: weight decay, the trust ratio and
    the learning rate follow as links of their own. This chain takes the steps of `lamb`, bit for
    bit, with all arguments that both have:

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> tx = optax.chain(
    ...     scale_by_lamb(), optim.add_decayed_weights(0.01), optim.scale_by_trust_ratio(),
    ...     optax.scale_by_learning_rate(0.1))
    >>> params, grads = {'kernel': jnp.array([3., 4.])}, {'kernel': jnp.array([1., 2.])}
    >>> print(tx.update(grads, tx.init(params), params)[0]['kernel'])
    [-0.3518412  -0.35525733]
    >>> lamb = optim.lamb(0.1, weight_decay=0.01)
    >>> print(lamb.update(grads, lamb.init(params), params)[0]['kernel'])
    [-0.3518412  -0.35525733]

    Args:
      b1: see `lamb`, as for all arguments here.
      b2: of the second moments.
      eps: outside the root.
      bias_correction: 'moments' or 'none'. The form 'step' of `lamb` is a factor of the rate.
      eps_root: inside the root.
      grad_averaging: False puts the gradient into the first moment whole.
      nesterov: 'none', 'first' (N-LAMB) or 'both' (NN-LAMB).
      cautious: keep only the elements that have the sign of the gradient.
      rules: which axes stack layers, for `cautious`.
      axis_name: the mesh axes over which leaves are split, for `cautious`, see
        `trust_ratio.scale_by_trust_ratio`.
      mu_dtype: the dtype in which first moments are kept.
      nu_dtype: the dtype in which second moments are kept.

    Returns:
      A transform whose `update` needs `params`; directions have the parameters' dtypes. For
      parameters narrower than float32 put `chains.in_float32` around the chain, so that nothing is
      rounded between its links.

    Raises:
      ValueError: for an argument that is out of range or no choice, naming it.
    """
    checks.check_choice("bias_correction", bias_correction, BIAS_CORRECTIONS)
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

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: jax.Array) -> Step:
        mu, nu = adam.moments(leaf, mu, nu)
        return adam.direction(leaf, mu, nu)(mu, nu), (mu, nu), None

    # A link has the rate 1: the learning rate is a link of its own.
    return leafwise.transform(
        ScaleByLambState,
        adam.init_leaf,
        step_leaf,
        1.0,
        rules,
        axis_name=axis_name,
        real_only=adam.real_only,
    )


def scale_by_lars(
    momentum: float = 0.9,
    nesterov: bool = False,
    dampening: float = 0.0,
    dampen_first: bool = True,
    momentum_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LARS's momentum, :math:`b_t = \mu b_{t-1} + (1 - d) u_t` of whatever comes in as :math:`u`.

    Alone it is the momentum of SGD: weight decay, the trust ratio and the learning rate are links
    of their own, and the forms of LARS are the orders in which they stand, always behind the decay:

    - ratio, rate, momentum: `lars` with `denominator='decayed', accumulate='steps'`;
    - ratio, momentum, rate: with `denominator='decayed', accumulate='adapted'`;
    - momentum, ratio, rate: with `denominator='momentum', accumulate='gradients'`.

    The denominator 'gradient' adds the norm of the decay to that of a gradient that has none yet,
    and LARC's clip compares the ratio with the rate, so those forms are `lars` alone.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> tx = optax.chain(
    ...     optim.add_decayed_weights(1e-4), optim.scale_by_trust_ratio(coefficient=0.001),
    ...     optax.scale_by_learning_rate(10.), scale_by_lars(0.9))
    >>> params, grads = {'kernel': jnp.array([3., 4.])}, {'kernel': jnp.array([0., 2.])}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> print(round(float(updates['kernel'][1]), 4))  # 10 * 0.001 * 5 / 2 * 2
    -0.05

    Args:
      momentum: :math:`\mu`, in [0, 1); 0.9 in the paper.
      nesterov: give :math:`\mu b_t + (1 - d) u_t`, not :math:`b_t`.
      dampening: :math:`d`, in [0, 1). Equal to `momentum` it makes :math:`b` a running mean.
      dampen_first: False leaves the first summand whole, as PyTorch's SGD does.
      momentum_dtype: the dtype in which the momentum is kept; None for float32 (float64 for
        float64 leaves).

    Returns:
      A transform whose `update` needs `params`; directions have the parameters' dtypes, see
      `scale_by_lamb` for narrow ones.

    Raises:
      ValueError: for an argument that is out of range, naming it.
    """
    heavy_ball = Momentum(momentum, nesterov, dampening, dampen_first, momentum_dtype)

    def step_leaf(leaf: Leaf, buffer: jax.Array) -> Step:
        direction, buffer = heavy_ball.step(leaf, buffer, leaf.grad)
        return direction, (buffer,), None

    return leafwise.transform(
        ScaleByLarsState, heavy_ball.init_leaf, step_leaf, 1.0, parameters.DEFAULT_RULES
    )


@dataclasses.dataclass(frozen=True)
class AdamDirection:
    """Adam's moments and direction of one leaf, in the forms that LAMB has; see `lamb`."""

    b1: float
    b2: float
    eps: float
    corrected: bool  # the moments, for their start at 0
    eps_root: float
    grad_averaging: bool
    nesterov: str
    cautious: bool
    mu_dtype: Any
    nu_dtype: Any

    def __post_init__(self) -> None:
        checks.check_range("b1", self.b1, upper=1.0)
        checks.check_range("b2", self.b2, upper=1.0)
        checks.check_range("eps", self.eps)
        checks.check_range("eps_root", self.eps_root)
        checks.check_choice("nesterov", self.nesterov, NESTEROVS)
        checks.check_flag("grad_averaging", self.grad_averaging)
        checks.check_flag("cautious", self.cautious)
        checks.check_dtype("mu_dtype", self.mu_dtype)
        checks.check_dtype("nu_dtype", self.nu_dtype, squares=True)

    @property
    def real_only(self) -> str | None:
        """The argument that rules out complex leaves, see `leafwise.transform`."""
        return "cautious" if self.cautious else None

    def init_leaf(
        self, param: jax.Array, facts: ParameterFacts, split: Split
    ) -> tuple[jax.Array, jax.Array]:
        """The moments before the first update."""
        del facts, split
        return leafwise.zeros_like(param, self.mu_dtype), leafwise.zero_squares(
            param, self.nu_dtype
        )

    def moments(self, leaf: Leaf, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The moments with the leaf's gradient in them."""
        grad, dtype, real = leaf.grad, leaf.weights.dtype, leaf.rate.dtype
        mu = (self.b1 * mu.astype(dtype) + self._newest * grad).astype(mu.dtype)
        square = trust_ratio.real_product((1 - self.b2) * grad, grad)
        return mu, (self.b2 * nu.astype(real) + square).astype(nu.dtype)

    def direction(
        self, leaf: Leaf, mu: jax.Array, nu: jax.Array
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns a function of the new moments to the direction, to be computed anew by it."""
        grad, dtype, real = leaf.grad, leaf.weights.dtype, leaf.rate.dtype
        of_mu, of_grad = self._shares(leaf, self.b1, self._newest, self.nesterov != "none")
        of_nu, of_square = self._shares(leaf, self.b2, 1 - self.b2, self.nesterov == "both")
        # N-LAMB has the factor b2 in its second moment too, see `lamb`.
        if self.nesterov == "first":
            of_nu = self.b2 * of_nu

        # The shares are scalars and captured. The moments are arguments, so that a caller can put
        # them behind a barrier and have all of this computed a second time.
        def adam(mu: jax.Array, nu: jax.Array) -> jax.Array:
            mean, square = of_mu * mu.astype(dtype), of_nu * nu.astype(real)
            if of_grad is not None:
                mean = mean + of_grad * grad
            if of_square is not None:
                square = square + trust_ratio.real_product(of_square * grad, grad)
            return mean / (trust_ratio.root(square + self.eps_root) + self.eps)

        if not self.cautious:
            return adam
        # The fraction that is kept needs the whole leaf, so it is known before the mask is applied.
        # It is at least 0.001, as in timm.
        same_sign = (adam(mu, nu) * grad > 0).astype(dtype)
        mean = trust_ratio.leaf_mean(same_sign, leaf.facts, leaf.axis_name)
        kept = jnp.maximum(mean, 1e-3)

        def masked(mu: jax.Array, nu: jax.Array) -> jax.Array:
            value = adam(mu, nu)
            return value * ((value * grad > 0).astype(dtype) / kept)

        return masked

    @property
    def _newest(self) -> float:
        return 1 - self.b1 if self.grad_averaging else 1

    def _shares(self, leaf: Leaf, base: float, newest: float, ahead: bool) -> tuple[Any, Any]:
        """The factors of a moment and of its newest term in the moment's estimate."""
        now: float | jax.Array = 1.0
        coming: float | jax.Array = 1.0
        real = leaf.rate.dtype
        if self.corrected:
            # The count holds this update, so it is t.
            now = 1 / one_minus_power(base, leaf.count, real)
        if not ahead:
            return now, None
        if self.corrected:
            # t + 1: Nesterov's form reads the moment one update ahead.
            coming = 1 / one_minus_power(base, optax.safe_increment(leaf.count), real)
        return base * coming, newest * now


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum of one leaf, in the forms that LARS has; see `lars`."""

    momentum: float
    nesterov: bool
    dampening: float
    dampen_first: bool
    dtype: Any

    def __post_init__(self) -> None:
        checks.check_range("momentum", self.momentum, upper=1.0)
        checks.check_range("dampening", self.dampening, upper=1.0)
        checks.check_flag("nesterov", self.nesterov)
        checks.check_flag("dampen_first", self.dampen_first)
        checks.check_dtype("momentum_dtype", self.dtype)

    def init_leaf(self, param: jax.Array, facts: ParameterFacts, split: Split) -> tuple[jax.Array]:
        """The momentum before the first update."""
        del facts, split
        return (leafwise.zeros_like(param, self.dtype),)

    def step(
        self, leaf: Leaf, buffer: jax.Array, summand: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The direction, and the momentum with the summand in it."""
        share: Any = 1 - self.dampening
        if not self.dampen_first:
            # PyTorch's SGD starts its buffer with the first gradient as it is.
            share = jnp.where(leaf.completed == 0, 1.0, share).astype(leaf.rate.dtype)
        summand = share * summand
        total = self.momentum * buffer.astype(leaf.weights.dtype) + summand
        direction = self.momentum * total + summand if self.nesterov else total
        return direction, total.astype(buffer.dtype)
