r"""LAMB's and LARS's directions as transforms for `optax.chain`.

Learning rate, weight decay and trust ratio are separate transforms: `optax.scale_by_learning_rate`,
`chains.add_decayed_weights` and `trust_ratio.scale_by_trust_ratio`. `lamb` and `lars` use the same
`AdamDirection` and `Momentum` as the transforms of this module.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
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
    momentum: Any  # the parameters' shapes, float32 unless momentum_dtype is given


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

    This is Adam's direction. LAMB is a chain of this direction, weight decay, the trust ratio and
    the learning rate. The following chain equals `lamb` bit for bit, whatever the values of the arguments
    that `scale_by_lamb` and `lamb` share:

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

    Args: see `lamb`. `bias_correction='step'` is not available, because this correction is a factor of
      the learning rate. `rules` (which axes stack layers) and `axis_name` only have an effect with
      `cautious`.

    Returns:
      A transform whose `update` needs `params`; directions have the parameters' dtypes. If
      parameters are narrower than float32, wrap the chain in `chains.in_float32`, so that no value
      is rounded between its transforms.
    """
    given = checks.checked(scale_by_lamb, locals())
    checks.check_choices(
        bias_correction=(bias_correction, BIAS_CORRECTIONS), nesterov=(nesterov, NESTEROVS)
    )
    adam = AdamDirection(**given)

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: jax.Array) -> Step:
        mu, nu = adam.moments(leaf, mu, nu)
        return adam.direction(leaf, mu, nu)(mu, nu), (mu, nu), None

    # The learning rate is 1 here; `optax.scale_by_learning_rate` is a separate transform.
    return leafwise.transform(
        ScaleByLambState, adam.init_leaf, step_leaf, 1.0, **leafwise.common(given)
    )


def scale_by_lars(
    momentum: float = 0.9,
    nesterov: bool = False,
    dampening: float = 0.0,
    dampen_first: bool = True,
    momentum_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LARS's momentum, :math:`b_t = \mu b_{t-1} + (1 - d) u_t`, of incoming updates :math:`u`.

    This is the momentum of SGD. LARS is a chain of this momentum, weight decay, the trust ratio and
    the learning rate. The order of the transforms after the decay selects the form of LARS:

    - ratio, rate, momentum: `lars` with `denominator='decayed', accumulate='steps'`;
    - ratio, momentum, rate: `denominator='decayed', accumulate='adapted'`;
    - momentum, ratio, rate: `denominator='momentum', accumulate='gradients'`.

    Two forms are only available in `lars`: the denominator 'gradient', which needs separate norms of
    the decay and the raw gradient; and LARC's clip, which compares the ratio with the rate.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> tx = optax.chain(
    ...     optim.add_decayed_weights(1e-4), optim.scale_by_trust_ratio(coefficient=0.001),
    ...     optax.scale_by_learning_rate(10.), scale_by_lars(0.9))
    >>> params, grads = {'kernel': jnp.array([3., 4.])}, {'kernel': jnp.array([0., 2.])}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> print(round(float(updates['kernel'][1]), 4))  # 10 * 0.001 * 5 / 2 * 2
    -0.05

    Args: see `lars`; :math:`\mu` is `momentum` and :math:`d` is `dampening`.

    Returns:
      A transform whose `update` needs `params`; directions have the parameters' dtypes. If the
      parameters are narrower than float32, see `scale_by_lamb`.
    """
    heavy_ball = Momentum(**checks.checked(scale_by_lars, locals()))

    def step_leaf(leaf: Leaf, buffer: jax.Array) -> Step:
        direction, buffer = heavy_ball.step(leaf, buffer, leaf.grad)
        return direction, (buffer,), None

    return leafwise.transform(
        ScaleByLarsState, heavy_ball.init_leaf, step_leaf, 1.0, parameters.DEFAULT_RULES
    )


class AdamDirection(leafwise.Arguments):
    """Computes Adam's moments and direction for one leaf; attributes are arguments of `lamb`."""

    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[jax.Array, jax.Array]:
        del metadata, split
        return leafwise.initial_moments(param, self.mu_dtype, self.nu_dtype)

    def moments(self, leaf: Leaf, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the moments, updated with the leaf's gradient."""
        return leafwise.moments(leaf, leaf.grad, mu, nu, self.b1, self.b2, self._newest)

    def direction(
        self, leaf: Leaf, mu: jax.Array, nu: jax.Array
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns a function that computes the direction from the new moments."""
        grad, dtype, real = leaf.grad, leaf.weights.dtype, leaf.rate.dtype
        of_mu, of_grad = self._shares(leaf, self.b1, self._newest, self.nesterov != "none")
        of_nu, of_square = self._shares(leaf, self.b2, 1 - self.b2, self.nesterov == "both")
        # In N-LAMB the estimate of the second moment has an additional factor b2, see `lamb`.
        if self.nesterov == "first":
            of_nu = self.b2 * of_nu

        # The moments are arguments, so that the caller can compute the direction a second time from
        # moments that it has passed through an optimization barrier.
        def adam(mu: jax.Array, nu: jax.Array) -> jax.Array:
            mean, square = of_mu * mu.astype(dtype), of_nu * nu.astype(real)
            if of_grad is not None:
                mean = mean + of_grad * grad
            if of_square is not None:
                square = square + trust_ratio.real_product(of_square * grad, grad)
            return mean / (trust_ratio.root(square + self.eps_root) + self.eps)

        if not self.cautious:
            return adam
        # Compute the fraction of elements with the gradient's sign first, because it needs the full
        # leaf. As in timm, the fraction counts as at least 0.001.
        same_sign = (adam(mu, nu) * grad > 0).astype(dtype)
        mean = trust_ratio.leaf_mean(same_sign, leaf.metadata, leaf.axis_name)
        fraction = jnp.maximum(mean, 1e-3)

        def masked(mu: jax.Array, nu: jax.Array) -> jax.Array:
            value = adam(mu, nu)
            return value * ((value * grad > 0).astype(dtype) / fraction)

        return masked

    @property
    def _newest(self) -> float:
        return 1 - self.b1 if self.grad_averaging else 1

    def _shares(self, leaf: Leaf, base: float, newest: float, ahead: bool) -> tuple[Any, Any]:
        """Returns the factors by which the estimate of a moment weights the moment and its newest term.

        Without Nesterov's form (`ahead` is False), the estimate has no separate newest term, and the
        second factor is None.
        """
        now: float | jax.Array = 1.0
        coming: float | jax.Array = 1.0
        if self.bias_correction == "moments":
            now = 1 / leafwise.correction(leaf, base)
        if not ahead:
            return now, None
        if self.bias_correction == "moments":
            # t + 1: Nesterov's form reads the moment one update ahead.
            count = optax.safe_increment(leaf.count)
            coming = 1 / one_minus_power(base, count, leaf.rate.dtype)
        return base * coming, newest * now


class Momentum(leafwise.Arguments):
    """Computes the momentum of one leaf; attributes are arguments of `lars`."""

    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[jax.Array]:
        del metadata, split
        return (leafwise.zeros_like(param, self.momentum_dtype),)

    def step(
        self, leaf: Leaf, buffer: jax.Array, summand: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the direction, and the momentum updated with the summand."""
        share: Any = 1 - self.dampening
        if not self.dampen_first:
            # PyTorch's SGD initialises its buffer with the undampened first gradient.
            share = jnp.where(leaf.completed == 0, 1.0, share).astype(leaf.rate.dtype)
        summand = share * summand
        total = self.momentum * buffer.astype(leaf.weights.dtype) + summand
        direction = self.momentum * total + summand if self.nesterov else total
        return direction, total.astype(buffer.dtype)
