r"""1-bit Adam: Adam first, then momentum with a frozen scale, whose exchange takes one bit a value.

Compression with error feedback suits what is linear in the gradient, as momentum is. Adam's second
moments are not; but they settle early, and are frozen then.
"""

from typing import Any, NamedTuple

import jax
import optax

from lamb_tpu.optim import chains, leafwise, parameters, staged, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.staged import MaskedRows, Stage
from lamb_tpu.optim.trust_ratio import Readings


class OnebitAdamState(NamedTuple):
    """State of `onebit_adam`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments, the mean over devices: the parameters' shapes, float32
    nu: Any  # second moments: the same shapes; frozen after the warm-up
    readings: Readings | None

    @property
    def remedy(self) -> str:
        """Advice for a run that diverges."""
        return staged.REMEDY


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    freeze_step: int = 23_000,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    relative_floor: float = staged.RELATIVE_FLOOR,
    mask_unseen: bool = True,
    masked_rows: MaskedRows = (),
    discard_first: bool = False,
    rules: Rules = parameters.DEFAULT_RULES,
    clip_global_norm: float | None = None,
    collect: bool = False,
) -> staged.Staged:
    r"""Adam without bias correction, whose second moments are frozen after the warm-up.

    .. math::
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \text{ up to } v_T, T = \text{freeze\_step} \\
      w_t &= w_{t-1} - \eta \left(\frac{m_t}{\sqrt{v_t} + \epsilon} + \lambda w_{t-1}\right)

    After the warm-up each device adds its own gradient to the momentum, and the mean of these
    momenta over devices is exchanged in place of gradients, see `staged.transform`.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> tx = onebit_adam(0.1, freeze_step=1)
    >>> state = tx.init(params)
    >>> for gradient in (jnp.array([1., 2.]), jnp.array([3., 2.])):
    ...     updates, state = tx.update({'kernel': gradient}, state, params)
    >>> print(state.nu['kernel'])  # 0.001 times the square of the first gradient
    [0.001 0.004]
    >>> print(updates['kernel'].round(4))
    [-1.2333 -0.6008]

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates.
      freeze_step: updates of the warm-up; the authors take 15 to 25 % of a run, 23,000 for
        BERT-Large at sequence length 128.
      b1: :math:`\beta_1`, in [0, 1).
      b2: :math:`\beta_2`, in [0, 1).
      eps: :math:`\epsilon`.
      weight_decay: :math:`\lambda`, a number or a schedule.
      relative_floor: after the warm-up, :math:`\sqrt v` in the denominator is at least this
        fraction of the root of its layer's mean :math:`v`; in [0, 1), 0 for none, as in DeepSpeed.
        See `staged.denominator`.
      mask_unseen: after the warm-up, momentum of elements that had no gradient before its end is 0.
        One bit cannot say 0.
      masked_rows: rows whose momentum is 0 after the warm-up, such as position embeddings beyond
        the sequence length: pairs (regex over paths, (first row, row after the last)).
      discard_first: throw the first gradient away, as DeepSpeed does: that update, which makes its
        buffers, counts, and changes nothing else.
      rules: which leaves decay, see `parameters.resolve`.
      clip_global_norm: the norm above which gradients are scaled down to it, after the warm-up that
        of each device's own.
      collect: keep each layer's norms in the state, see `readings.read`.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      Tang et al., 1-bit Adam, arXiv:2102.02888; OnebitAdam of DeepSpeed, which has no bias
      correction either.
    """
    chains.check_numbers(learning_rate, weight_decay, {"b1": b1, "b2": b2}, eps=eps)
    staged.check_mask(mask_unseen, masked_rows)
    staged.check_floor(relative_floor)
    stages, index = staged.frozen_after(freeze_step, discard_first)

    def init_leaf(param: jax.Array, facts: ParameterFacts) -> tuple[jax.Array, ...]:
        return leafwise.zeros_like(param), leafwise.zero_squares(param)

    def step(stage: Stage, leaves: list[Leaf], buffers: list[tuple], reduce: Any) -> list[Step]:
        mus = [b1 * mu + (1 - b1) * leaf.grad for leaf, (mu, _) in zip(leaves, buffers)]
        nus = [nu for _, nu in buffers]
        if stage.reduces:
            mus = [
                staged.masked(mu, leaf, nu, mask_unseen, masked_rows)
                for mu, leaf, nu in zip(reduce(mus), leaves, nus, strict=True)
            ]
        else:
            nus = [
                b2 * nu + (1 - b2) * trust_ratio.real_product(leaf.grad, leaf.grad)
                for leaf, nu in zip(leaves, nus, strict=True)
            ]
        floor = relative_floor if stage.reduces else 0.0
        steps = [
            direction(leaf, mu, staged.denominator(nu, leaf.facts, eps, floor), weight_decay)
            for leaf, mu, nu in zip(leaves, mus, nus, strict=True)
        ]
        return [
            (-leaf.rate * found, (mu, nu), None)
            for leaf, found, mu, nu in zip(leaves, steps, mus, nus, strict=True)
        ]

    return staged.transform(
        OnebitAdamState,
        init_leaf,
        step,
        stages,
        index,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        collect=collect,
    )


def direction(
    leaf: Leaf, mu: jax.Array, denominator: jax.Array, weight_decay: optax.ScalarOrSchedule
) -> jax.Array:
    """Momentum over the denominator, plus the decayed weights where they decay."""
    found = mu / denominator
    if leaf.facts.decay:
        decay = leafwise.decay_at(weight_decay, leaf.facts, leaf.completed, leaf.rate.dtype)
        found = found + decay * leaf.weights
    return found
