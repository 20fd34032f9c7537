r"""1-bit Adam: after a warm-up, devices exchange momentum with one bit per value.

Compression with error feedback suits quantities that are linear in the gradient, such as momentum.
Adam's second moments are not linear in the gradient. But they become stable early in training, so
they are frozen after the warm-up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, staged, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Message, Step
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.staged import MaskedRows, Stage
from lamb_tpu.optim.trust_ratio import Diagnostics


class OnebitAdamState(NamedTuple):
    """State of `onebit_adam`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments, the mean over devices: the parameters' shapes, float32
    nu: Any  # second moments: the same shapes; frozen after the warm-up
    diagnostics: Diagnostics | None

    @property
    def remedy(self) -> str:
        """Advice for the error that ends a diverged run."""
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
    r"""Adam without bias correction and with second moments that are frozen after the warm-up.

    .. math::
      m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \text{ up to } v_T, T = \text{freeze\_step} \\
      w_t &= w_{t-1} - \eta \left(\frac{m_t}{\sqrt{v_t} + \epsilon} + \lambda w_{t-1}\right)

    After the warm-up each device adds its local gradient to the momentum, and the devices average
    their momenta instead of their gradients, see `leafwise.transform`.

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
      learning_rate: :math:`\eta`. `lamb_tpu.optim` describes all arguments that are not listed
        here.
      freeze_step: the number of warm-up updates; the authors use 15 to 25 % of a run, and 23,000
        updates for BERT-Large at sequence length 128.
      b1: :math:`\beta_1`, in [0, 1).
      b2: :math:`\beta_2`, in [0, 1).
      eps: :math:`\epsilon`.
      weight_decay: :math:`\lambda`.
      relative_floor: after the warm-up, :math:`\sqrt v` in the denominator is at least this
        fraction of the root of the layer's mean :math:`v`; in [0, 1). 0 for no floor, as in
        DeepSpeed. See `staged.denominator`.
      mask_unseen: whether the momentum is set to 0 after the warm-up for elements that had no
        gradient during the warm-up, because one bit cannot represent 0.
      masked_rows: pairs (regex over paths, (first row, row after the last)) of rows with a momentum
        of 0 after the warm-up, such as position embeddings beyond the sequence length.
      discard_first: whether the first update discards its gradient and changes nothing except the
        count, as in DeepSpeed, which creates its buffers in this update.
      clip_global_norm: after the warm-up, the limit on the norm of each device's local gradient.

    References:
      Tang et al., 1-bit Adam, arXiv:2102.02888; OnebitAdam of DeepSpeed, which has no bias
      correction either.
    """
    given = checks.checked(onebit_adam, locals())
    stages = staged.frozen_after(freeze_step, discard_first)
    step = _Step(**given)
    return leafwise.transform(
        OnebitAdamState, step.init_leaf, step, stages=stages, **leafwise.common(given)
    )


class OneBit(leafwise.Arguments):
    """Computes momentum, second moments and direction of one leaf for the 1-bit optimizers."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        staged.check_masked_rows(self.masked_rows)

    def momentum(self, mu: jax.Array, grad: jax.Array) -> jax.Array:
        """Returns the momentum, updated with a gradient."""
        return self.b1 * mu + (1 - self.b1) * grad

    def squares(self, nu: jax.Array, grad: jax.Array) -> jax.Array:
        """Returns the second moments, updated with a gradient."""
        return self.b2 * nu + (1 - self.b2) * trust_ratio.real_product(grad, grad)

    def masked(self, leaf: Leaf, values: jax.Array, nu: jax.Array) -> jax.Array:
        """Sets exchanged values of masked elements to 0, because one bit cannot represent 0.

        The masked elements are those in `masked_rows` and, with `mask_unseen`, those with a second
        moment of 0. Rows are counted along the first axis that does not stack layers.
        """
        if self.mask_unseen:
            values = jnp.where(nu == 0, 0.0 * values, values)
        for pattern, (first, last) in self.masked_rows:
            if not parameters.matches(pattern, leaf.path):
                continue
            axes = [axis for axis in range(values.ndim) if axis not in leaf.metadata.layer_axes]
            if not axes or values.shape[axes[0]] < last:
                raise ValueError(
                    f"masked_rows={(first, last)} must be a range of rows of the parameter "
                    f"{leaf.path!r}, which has the shape {values.shape}"
                )
            row = jax.lax.broadcasted_iota(jnp.int32, values.shape, axes[0])
            values = jnp.where((row < first) | (row >= last), values, 0.0)
        return values

    def denominator(self, leaf: Leaf, nu: jax.Array) -> jax.Array:
        """Returns the denominator for momentum sent with one bit, see `staged.denominator`."""
        return staged.denominator(nu, leaf.metadata, self.eps, self.relative_floor)

    def direction(self, leaf: Leaf, mu: jax.Array, denominator: jax.Array) -> jax.Array:
        """Returns momentum over the denominator, plus weight decay if the leaf decays."""
        direction = mu / denominator
        if leaf.metadata.decay:
            direction = direction + leafwise.decay_of(leaf, self.weight_decay) * leaf.weights
        return direction


class _Step(OneBit):
    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[Any, ...]:
        del metadata, split
        return leafwise.initial_moments(param)

    def __call__(
        self, stage: Stage, leaves: list[Leaf], buffers: list[tuple]
    ) -> list[Step] | Message:
        mus = [self.momentum(mu, leaf.grad) for leaf, (mu, _) in zip(leaves, buffers, strict=True)]
        if stage.reduces:
            return Message(mus, lambda means: list(map(self.compressed, leaves, means, buffers)))
        return list(map(self.warm_up, leaves, mus, buffers))

    def warm_up(self, leaf: Leaf, mu: jax.Array, old: tuple) -> Step:
        """Returns Adam's step without bias correction."""
        nu = self.squares(old[1], leaf.grad)
        step = self.direction(leaf, mu, trust_ratio.root(nu) + self.eps)
        return -leaf.rate * step, (mu, nu), None

    def compressed(self, leaf: Leaf, mean: jax.Array, old: tuple) -> Step:
        """Returns the step along the devices' mean momentum."""
        _, nu = old
        mu = self.masked(leaf, mean, nu)
        step = self.direction(leaf, mu, self.denominator(leaf, nu))
        return -leaf.rate * step, (mu, nu), None
