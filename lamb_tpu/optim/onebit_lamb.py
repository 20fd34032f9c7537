r"""1-bit LAMB: after a warm-up, devices exchange momentum with one bit per value.

As in 1-bit Adam, second moments are frozen after the warm-up. The trust ratio depends on second moments, so
the moving average of each layer's ratio is frozen too. A factor then corrects this frozen ratio: the
exchanged momentum shows approximately by how much the second moments would have changed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, staged, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Message, Step
from lamb_tpu.optim.onebit_adam import OneBit
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.staged import MaskedRows, Stage
from lamb_tpu.optim.trust_ratio import Diagnostics, LayerRatio, real_product


class OnebitLambState(NamedTuple):
    """State of `onebit_lamb`.

    `coefficient`, `factor` and `scaling` have one value per layer: the arrays have size 1 along all
    axes of the leaf that do not stack layers.
    """

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments, the mean over devices: the parameters' shapes, float32
    nu: Any  # second moments: the same shapes; frozen after the warm-up
    fresh: Any  # second moments after the warm-up, of gradients reconstructed from the momentum
    coefficient: Any  # moving average of the trust ratio; frozen after the warm-up
    factor: Any  # correction of the frozen ratio
    scaling: Any  # gives the momentum of all layers the same RMS in the exchange; 0 in the warm-up
    diagnostics: Diagnostics | None

    @property
    def remedy(self) -> str:
        """Advice for the error that ends a diverged run."""
        return staged.REMEDY


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    freeze_step: int = 1000,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    ratio_bounds: tuple[float, float] = (0.01, 10.0),
    b3: float = 0.9,
    factor_bounds: tuple[float, float] = (0.5, 4.0),
    factor_threshold: float = 0.1,
    relative_floor: float = staged.RELATIVE_FLOOR,
    mask_unseen: bool = True,
    masked_rows: MaskedRows = (),
    discard_first: bool = False,
    rules: Rules = parameters.DEFAULT_RULES,
    clip_global_norm: float | None = None,
    collect: bool = False,
) -> staged.Staged:
    r"""LAMB without bias correction; second moments and ratios are frozen after the warm-up.

    In the warm-up, with Adam's :math:`u_t = m_t / (\sqrt{v_t} + \epsilon) + \lambda w_{t-1}`, for
    each layer separately:

    .. math::
      r_t = \mathrm{clip}(\|w_{t-1}\| / \|u_t\|), \quad
      c_t = \beta_3 c_{t-1} + (1 - \beta_3) r_t, \quad
      w_t = w_{t-1} - \eta r_t u_t

    Afterwards each device adds its local gradient to the momentum. The devices average
    :math:`s \, m_t`, where the factor :math:`s` of each layer makes the root mean squares of all
    layers equal. :math:`v` and :math:`c` are frozen. With
    :math:`\tilde g_t = (m_t - \beta_1 m_{t-1}) / (1 - \beta_1)`:

    .. math::
      \tilde v_t &= \beta_2 \tilde v_{t-1} + (1 - \beta_2) \tilde g_t^2, \quad
      q_t = \min\left(1, \frac{\|m_t / (\sqrt v + \epsilon)\|}{\|u_t\|}\right) \\
      f_t &= q_t \max \frac{\sqrt v + \epsilon}{\sqrt{\tilde v_t} + \epsilon} + 1 - q_t
        \text{, within its bounds and near } f_{t-1} \\
      w_t &= w_{t-1} - \eta c f_t u_t

    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> tx = onebit_lamb(0.1, freeze_step=1, collect=True)
    >>> state = tx.init(params)
    >>> for gradient in (jnp.array([1., 2.]), jnp.array([3., 2.])):
    ...     updates, state = tx.update({'kernel': gradient}, state, params)
    ...     print(state.diagnostics.ratios['kernel'])  # 5 / |(3.16, 3.16)|, then 0.1 * 0.9 of it
    1.1180340...
    0.1006230...
    >>> print(state.factor['kernel'])  # the second moments grow, so the step is shorter
    [0.9]

    Args:
      learning_rate: :math:`\eta`. `onebit_adam` describes all arguments that are not listed here.
      freeze_step: the number of warm-up updates; 1,000 in the authors' recipe for BERT.
      ratio_bounds: the bounds of the ratio in the warm-up; (0.01, 0.3) in the authors' recipe for
        BERT.
      b3: :math:`\beta_3`, in [0, 1). 1 / (1 - b3) should not exceed `freeze_step`, because the
        average starts at 0. As in DeepSpeed, the average leaves out a ratio of exactly 1.
      factor_bounds: bounds of :math:`f_t`.
      factor_threshold: the largest relative change from :math:`f_{t-1}` to :math:`f_t`.
      rules: the ratio of leaves that do not adapt is 1.

    References:
      Li et al., 1-bit LAMB, arXiv:2104.06069; OnebitLamb of DeepSpeed.
    """
    given = checks.checked(onebit_lamb, locals())
    stages = staged.frozen_after(freeze_step, discard_first)
    step = _Step(**given)
    return leafwise.transform(
        OnebitLambState, step.init_leaf, step, stages=stages, **leafwise.common(given)
    )


class _Step(OneBit):
    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[Any, ...]:
        layers = trust_ratio.leaf_norm(leafwise.zero_squares(param), metadata)
        # Separate arrays: a state that contains an array twice cannot be donated.
        coefficient, factor, scaling = (jnp.full_like(layers, value) for value in (0.0, 1.0, 0.0))
        fresh = leafwise.zero_squares(param)
        return *leafwise.initial_moments(param), fresh, coefficient, factor, scaling

    def __call__(
        self, stage: Stage, leaves: list[Leaf], buffers: list[tuple]
    ) -> list[Step] | Message:
        if not stage.reduces:
            return list(map(self.warm_up, leaves, buffers))
        scales = _scalings(leaves, buffers)
        sent = [
            scale * self.momentum(old[0], leaf.grad)
            for leaf, old, scale in zip(leaves, buffers, scales, strict=True)
        ]
        return Message(
            sent, lambda means: list(map(self.compressed, leaves, means, scales, buffers))
        )

    def warm_up(self, leaf: Leaf, buffers: tuple[Any, ...]) -> Step:
        """Returns LAMB's step without bias correction."""
        mu, nu, fresh, coefficient, factor, scaling = buffers
        mu, nu = self.momentum(mu, leaf.grad), self.squares(nu, leaf.grad)
        step, ratio = self.direction(leaf, mu, trust_ratio.root(nu) + self.eps), None
        if leaf.metadata.adapt:
            layers = LayerRatio(ratio_bounds=self.ratio_bounds)
            ratio = layers.of(leaf.weights, step, leaf.metadata)
            averaged = coefficient + (1 - self.b3) * (ratio - coefficient)
            coefficient = jnp.where(ratio == 1.0, coefficient, averaged)
            step = ratio * step
        return -leaf.rate * step, (mu, nu, fresh, coefficient, factor, scaling), ratio

    def compressed(self, leaf: Leaf, sent: jax.Array, scaling: jax.Array, buffers: tuple) -> Step:
        """Returns the step along the devices' mean momentum, with the frozen ratio."""
        old, nu, fresh, coefficient, factor, before = buffers
        mu = self.masked(leaf, sent / scaling, nu)
        gradient = (mu - self.b1 * old) / (1 - self.b1)
        fresh = jnp.where(before == 0, nu, fresh)
        fresh = self.squares(fresh, gradient)
        frozen, now = self.denominator(leaf, nu), self.denominator(leaf, fresh)
        step, ratio = self.direction(leaf, mu, frozen), None
        if leaf.metadata.adapt:
            factor = self.new_factor(
                # With eps = 0, elements without any gradient would give 0 / 0.
                trust_ratio.leaf_norm(
                    jnp.where(frozen > 0, frozen / now, 1.0), leaf.metadata, "linf"
                ),
                trust_ratio.leaf_norm(mu / frozen, leaf.metadata),
                trust_ratio.leaf_norm(step, leaf.metadata),
                factor,
            )
            ratio = coefficient * factor
            step = ratio * step
        return -leaf.rate * step, (mu, nu, fresh, coefficient, factor, scaling), ratio

    def new_factor(
        self, largest: jax.Array, adam_norm: jax.Array, norm: jax.Array, last: jax.Array
    ) -> jax.Array:
        """Returns the correction of the frozen ratio, from the norms of a layer."""
        # Second moments scale only Adam's share of the direction, not the share of the decay.
        share = jnp.where(norm > 0, jnp.minimum(1.0, adam_norm / jnp.where(norm > 0, norm, 1)), 1)
        factor = jnp.clip(largest * share + (1 - share), *self.factor_bounds)
        return jnp.clip(
            factor, last * (1 - self.factor_threshold), last * (1 + self.factor_threshold)
        )


def _scalings(leaves: list[Leaf], buffers: list[tuple]) -> list[jax.Array]:
    """Returns factors that give the momentum of every layer the same root mean square."""
    # A layer's factor is the mean RMS of all layers (also of the layers in stacks), divided by the
    # RMS of this layer.
    sizes = [
        trust_ratio.root(trust_ratio.leaf_mean(real_product(mu, mu), leaf.metadata))
        for leaf, (mu, *_) in zip(leaves, buffers, strict=True)
    ]
    count = max(sum(size.size for size in sizes), 1)
    mean = sum(jnp.sum(size) for size in sizes) / count
    # All-zero momentum has RMS 0; leave it unscaled.
    first = [jnp.where(s > 0, mean / jnp.where(s > 0, s, 1.0), 1.0) for s in sizes]
    return [
        # The scaling is 0 before the first update after the warm-up. The count could not detect
        # this update, because trainers may skip it.
        jnp.where(old == 0, new, old).astype(old.dtype)
        for new, (*_, old) in zip(first, buffers, strict=True)
    ]
