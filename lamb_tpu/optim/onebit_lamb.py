r"""1-bit LAMB: LAMB first, then frozen second moments and step lengths that follow from them.

The trust ratio needs the layer's own second moments, which are frozen once momentum is exchanged
in one bit a value. So the ratio's moving average is frozen too, and is corrected by how much the
second moments would have changed, as far as the exchanged momentum tells.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import chains, checks, leafwise, parameters, staged, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.onebit_adam import direction
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.staged import MaskedRows, Stage
from lamb_tpu.optim.trust_ratio import Readings, real_product


class OnebitLambState(NamedTuple):
    """State of `onebit_lamb`. What a layer has one of keeps the axes of its leaf, with size 1."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments, the mean over devices: the parameters' shapes, float32
    nu: Any  # second moments: the same shapes; frozen after the warm-up
    fresh: Any  # second moments that go on, of gradients as the momentum tells them
    coefficient: Any  # the moving average of a layer's trust ratio; frozen after the warm-up
    factor: Any  # by which the frozen ratio is multiplied
    scaling: Any  # of a layer's momentum that is sent, so that all layers are of one size; 0 before
    readings: Readings | None

    @property
    def remedy(self) -> str:
        """Advice for a run that diverges."""
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
    r"""LAMB without bias correction, whose moments and ratios are frozen after the warm-up.

    In the warm-up, with Adam's :math:`u_t = m_t / (\sqrt{v_t} + \epsilon) + \lambda w_{t-1}`, for
    each layer on its own:

    .. math::
      r_t = \mathrm{clip}(\|w_{t-1}\| / \|u_t\|), \quad
      c_t = \beta_3 c_{t-1} + (1 - \beta_3) r_t, \quad
      w_t = w_{t-1} - \eta r_t u_t

    Afterwards each device adds its own gradient to the momentum, and the mean over devices of these
    momenta, times :math:`s`, is exchanged, where :math:`s` makes the root mean squares of all
    layers equal. With :math:`v` and :math:`c` frozen and
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
    ...     print(state.readings.ratios['kernel'])  # 5 / |(3.16, 3.16)|, then a tenth of it
    1.1180340...
    0.1006230...
    >>> print(state.factor['kernel'])  # the second moments grow, so the step is shorter
    [0.9]

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates.
      freeze_step: updates of the warm-up; 1,000 in the authors' recipe for BERT.
      b1: :math:`\beta_1`, in [0, 1).
      b2: :math:`\beta_2`, in [0, 1).
      eps: :math:`\epsilon`.
      weight_decay: :math:`\lambda`, a number or a schedule.
      ratio_bounds: of the ratio in the warm-up; (0.01, 0.3) in the authors' recipe for BERT.
      b3: :math:`\beta_3`, in [0, 1): 1 / (1 - b3) should not be more than `freeze_step`, for the
        average starts at 0. A ratio of exactly 1 is not averaged, as in DeepSpeed.
      factor_bounds: of :math:`f_t`.
      factor_threshold: how far :math:`f_t` may be from :math:`f_{t-1}`, relatively.
      relative_floor: after the warm-up, :math:`\sqrt v` in the denominator is at least this
        fraction of the root of its layer's mean :math:`v`; in [0, 1), 0 for none, as in DeepSpeed.
        See `staged.denominator`.
      mask_unseen: after the warm-up, momentum of elements that had no gradient before its end is 0.
        One bit cannot say 0.
      masked_rows: rows whose momentum is 0 after the warm-up, such as position embeddings beyond
        the sequence length: pairs (regex over paths, (first row, row after the last)).
      discard_first: throw the first gradient away, as DeepSpeed does: that update, which makes its
        buffers, counts, and changes nothing else.
      rules: which leaves decay, which adapt, which axes stack layers, see `parameters.resolve`. The
        ratio of what does not adapt is 1.
      clip_global_norm: the norm above which gradients are scaled down to it, after the warm-up that
        of each device's own.
      collect: keep each layer's trust ratio and norms in the state, see `readings.read`.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      Li et al., 1-bit LAMB, arXiv:2104.06069; OnebitLamb of DeepSpeed.
    """
    chains.check_numbers(
        learning_rate,
        weight_decay,
        {"b1": b1, "b2": b2, "b3": b3},
        eps=eps,
        factor_threshold=factor_threshold,
    )
    checks.check_bounds("ratio_bounds", ratio_bounds)
    checks.check_bounds("factor_bounds", factor_bounds)
    staged.check_mask(mask_unseen, masked_rows)
    staged.check_floor(relative_floor)
    stages, index = staged.frozen_after(freeze_step, discard_first)

    def init_leaf(param: jax.Array, facts: ParameterFacts) -> tuple[jax.Array, ...]:
        layers = trust_ratio.leaf_norm(leafwise.zero_squares(param), facts)
        # Arrays of their own, for one that stands twice in a state cannot be donated.
        coefficient, factor, scaling = (jnp.full_like(layers, value) for value in (0.0, 1.0, 0.0))
        squares = leafwise.zero_squares(param), leafwise.zero_squares(param)
        return leafwise.zeros_like(param), *squares, coefficient, factor, scaling

    def warm_up(leaf: Leaf, buffers: tuple[Any, ...]) -> Step:
        mu, nu, fresh, coefficient, factor, scaling = buffers
        mu = b1 * mu + (1 - b1) * leaf.grad
        nu = b2 * nu + (1 - b2) * real_product(leaf.grad, leaf.grad)
        step, ratio = direction(leaf, mu, trust_ratio.root(nu) + eps, weight_decay), None
        if leaf.facts.adapt:
            ratio = trust_ratio.trust_ratio(
                trust_ratio.leaf_norm(leaf.weights, leaf.facts),
                trust_ratio.leaf_norm(step, leaf.facts),
                ratio_bounds=ratio_bounds,
            )
            averaged = coefficient + (1 - b3) * (ratio - coefficient)
            coefficient = jnp.where(ratio == 1.0, coefficient, averaged)
            step = ratio * step
        return -leaf.rate * step, (mu, nu, fresh, coefficient, factor, scaling), ratio

    def compressed(leaf: Leaf, mu: jax.Array, scaling: jax.Array, buffers: tuple) -> Step:
        old, nu, fresh, coefficient, factor, before = buffers
        mu = staged.masked(mu, leaf, nu, mask_unseen, masked_rows)
        gradient = (mu - b1 * old) / (1 - b1)
        fresh = jnp.where(before == 0, nu, fresh)
        fresh = b2 * fresh + (1 - b2) * real_product(gradient, gradient)
        frozen = staged.denominator(nu, leaf.facts, eps, relative_floor)
        now = staged.denominator(fresh, leaf.facts, eps, relative_floor)
        step, ratio = direction(leaf, mu, frozen, weight_decay), None
        if leaf.facts.adapt:
            factor = new_factor(
                # With an eps of 0, elements without any gradient would be 0 / 0.
                trust_ratio.leaf_norm(jnp.where(frozen > 0, frozen / now, 1.0), leaf.facts, "linf"),
                trust_ratio.leaf_norm(mu / frozen, leaf.facts),
                trust_ratio.leaf_norm(step, leaf.facts),
                factor,
            )
            ratio = coefficient * factor
            step = ratio * step
        return -leaf.rate * step, (mu, nu, fresh, coefficient, factor, scaling), ratio

    def new_factor(
        largest: jax.Array, adam_norm: jax.Array, norm: jax.Array, last: jax.Array
    ) -> jax.Array:
        # The decay is no part of what the second moments scale.
        share = jnp.where(norm > 0, jnp.minimum(1.0, adam_norm / jnp.where(norm > 0, norm, 1)), 1)
        found = jnp.clip(largest * share + (1 - share), *factor_bounds)
        return jnp.clip(found, last * (1 - factor_threshold), last * (1 + factor_threshold))

    def scalings(leaves: list[Leaf], buffers: list[tuple]) -> list[jax.Array]:
        # The mean over layers, each of a stack by itself, over the layer's own.
        sizes = [
            trust_ratio.root(trust_ratio.leaf_mean(real_product(mu, mu), leaf.facts))
            for leaf, (mu, *_) in zip(leaves, buffers, strict=True)
        ]
        count = max(sum(size.size for size in sizes), 1)
        mean = sum(jnp.sum(size) for size in sizes) / count
        # Momentum that is all 0 has no size.
        first = [jnp.where(s > 0, mean / jnp.where(s > 0, s, 1.0), 1.0) for s in sizes]
        return [
            # The count does not tell the first update after the warm-up: a trainer may skip one.
            jnp.where(old == 0, new, old).astype(old.dtype)
            for new, (*_, old) in zip(first, buffers, strict=True)
        ]

    def step(stage: Stage, leaves: list[Leaf], buffers: list[tuple], reduce: Any) -> list[Step]:
        if not stage.reduces:
            return [warm_up(leaf, old) for leaf, old in zip(leaves, buffers, strict=True)]
        scales = scalings(leaves, buffers)
        sent = [
            scale * (b1 * old[0] + (1 - b1) * leaf.grad)
            for leaf, old, scale in zip(leaves, buffers, scales, strict=True)
        ]
        return [
            compressed(leaf, mu / scale, scale, old)
            for leaf, mu, scale, old in zip(leaves, reduce(sent), scales, buffers, strict=True)
        ]

    return staged.transform(
        OnebitLambState,
        init_leaf,
        step,
        stages,
        index,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        collect=collect,
    )
