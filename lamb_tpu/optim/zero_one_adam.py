r"""0/1 Adam: devices send one bit per value from the start, and second moments change rarely.

The intervals between changes of the second moments double during a run. An update that changes
second moments sends full gradients; the other updates send compressed gradients. After the second
moments are frozen, devices exchange displacements of the parameters instead, so they may take
several local steps between two exchanges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import checks, leafwise, parameters, staged, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Message, Step
from lamb_tpu.optim.onebit_adam import OneBit
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.staged import FIRST, MaskedRows, Stage, Stages, number
from lamb_tpu.optim.trust_ratio import Diagnostics

VARIANCE = Stage("variance")
GRADIENT = Stage("gradient", local=True, reduces=True)
FIRST_SYNC = Stage("first synchronisation", local=True, reduces=True, resets=True)
SYNC = Stage("synchronisation", local=True, reduces=True)
LOCAL = Stage("local step", local=True)
_LAST = 2**31 - 1


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32; local between exchanges
    nu: Any  # second moments: the same shapes
    moved: Any  # the sum of this device's updates since the last exchange: the parameters' shapes
    rates: Any  # one scalar per leaf: the sum of the learning rates since the last exchange
    diagnostics: Diagnostics | None

    @property
    def remedy(self) -> str:
        """Advice for the error that ends a diverged run."""
        return staged.REMEDY


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    var_freeze_step: int = 100_000,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32_678,
    local_step_clipper: int = 1,
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
    r"""Adam without bias correction, with second moments that are updated at doubling intervals.

    With :math:`u_t = m_t / (\sqrt v + \epsilon) + \lambda w_{t-1}` every update is
    :math:`w_t = w_{t-1} - \eta u_t`. There are two intervals, one between changes of the second
    moments and one between exchanges; both double during the run. Update t is one of these:

    - If t is at most `var_freeze_step` and a multiple of the first interval: both moments are updated
      with the gradient, which is sent in full.
    - For all other t of at most `var_freeze_step`: :math:`m` is updated with the gradient, which is
      sent compressed.
    - If t is above `var_freeze_step`: :math:`m` is updated with the local gradient. If t is a multiple of
      the second interval, devices exchange their displacements since the last exchange,
      :math:`-\sum \eta u`, times :math:`\sqrt v + \epsilon`. Parameters then move by the mean
      displacement instead of the local displacement, and :math:`m` becomes the exchanged mean
      divided by :math:`-\sum \eta`.

    >>> stage = zero_one_adam(
    ...     0.1, var_freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=2,
    ... ).stage
    >>> [stage(update).name for update in range(5)]
    ['variance', 'variance', 'gradient', 'variance', 'gradient']
    >>> [stage(update).name for update in range(5, 10)]  # 5 is t = 6, a multiple of 2
    ['variance', 'first synchronisation', 'synchronisation', 'local step', 'synchronisation']

    Args:
      learning_rate: :math:`\eta`. `onebit_adam` describes all arguments that are not listed here.
      var_freeze_step: the number of updates after which second moments are frozen; about the length
        of the learning rate's warm-up. DeepSpeed's argument of this name is one less.
      var_update_scaler: the number of changes of the second moments until their interval doubles.
      local_step_scaler: the number of updates until the interval between exchanges doubles.
      local_step_clipper: the longest interval between exchanges; 16 in DeepSpeed. If it is above 1,
        parameters differ between devices until the next exchange.
      weight_decay: :math:`\lambda`. As in DeepSpeed, after second moments are frozen the decay is
        part of the displacement and therefore of the momentum.
      relative_floor: applies from the start, and so do the masks of compressed values.
      clip_global_norm: limits the norm of the local gradient; in updates that send gradients in
        full, the norm of the summed gradient.

    References:
      Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam,
      arXiv:2202.06009; ZeroOneAdam of DeepSpeed, which has no bias correction either.
    """
    given = checks.checked(zero_one_adam, locals())
    checks.check_static(  # each stage is a separate program
        var_freeze_step=var_freeze_step,
        var_update_scaler=var_update_scaler,
        local_step_scaler=local_step_scaler,
        local_step_clipper=local_step_clipper,
    )
    step = _Step(**given)
    # If the longest interval is 1, every update after second moments are frozen is an exchange, so
    # there are no local steps.
    every: tuple[Stage, ...] = (VARIANCE, GRADIENT, FIRST_SYNC, SYNC)
    every += (LOCAL,) * (local_step_clipper > 1) + (FIRST,) * discard_first
    index = _index(
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper, discard_first
    )
    stages = Stages(every, index)
    return leafwise.transform(
        ZeroOneAdamState, step.init_leaf, step, stages=stages, **leafwise.common(given)
    )


class _Step(OneBit):
    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[Any, ...]:
        rates = jnp.zeros((), trust_ratio.real_dtype(param))
        return *leafwise.initial_moments(param), leafwise.zeros_like(param), rates

    def __call__(
        self, stage: Stage, leaves: list[Leaf], buffers: list[tuple]
    ) -> list[Step] | Message:
        if stage == VARIANCE:
            return list(map(self.variance, leaves, buffers))
        if stage == GRADIENT:
            grads = [leaf.grad for leaf in leaves]
            return Message(grads, lambda means: list(map(self.gradient, leaves, means, buffers)))
        steps = list(map(self.local, leaves, buffers))
        if stage == LOCAL:
            return steps
        local_buffers = [new for _, new, _ in steps]
        displacements = [
            moved * self.denominator(leaf, nu)
            for leaf, (_, nu, moved, _) in zip(leaves, local_buffers, strict=True)
        ]
        rates = [rates for *_, rates in local_buffers]
        return Message(
            displacements, lambda means: list(map(self.synchronised, leaves, means, rates, buffers))
        )

    def update(self, leaf: Leaf, mu: jax.Array, nu: jax.Array) -> jax.Array:
        return -leaf.rate * self.direction(leaf, mu, self.denominator(leaf, nu))

    def variance(self, leaf: Leaf, buffers: tuple) -> Step:
        """Returns the step of an update that changes both moments."""
        mu, nu, moved, rates = buffers
        nu = self.squares(nu, leaf.grad)
        mu = self.momentum(mu, leaf.grad)
        return self.update(leaf, mu, nu), (mu, nu, moved, rates), None

    def gradient(self, leaf: Leaf, grad: jax.Array, buffers: tuple) -> Step:
        """Returns the step of an update with a gradient that was sent compressed."""
        mu, nu, moved, rates = buffers
        mu = self.momentum(mu, self.masked(leaf, grad, nu))
        return self.update(leaf, mu, nu), (mu, nu, moved, rates), None

    def local(self, leaf: Leaf, buffers: tuple) -> Step:
        """Returns the step of an update with the local gradient."""
        mu, nu, moved, rates = buffers
        mu = self.momentum(mu, leaf.grad)
        step = self.update(leaf, mu, nu)
        return step, (mu, nu, moved + step, rates + leaf.rate), None

    def synchronised(self, leaf: Leaf, mean: jax.Array, rates: jax.Array, before: tuple) -> Step:
        """Returns the step from this device's parameters to the common parameters."""
        _, nu, moved, _ = before
        mean = self.masked(leaf, mean, nu)
        # If all rates were 0, no parameter moved, and the momentum starts again from 0.
        mu = -mean / jnp.where(rates > 0, rates, 1.0)
        # Undo the local displacement and apply the mean displacement. If every update is an
        # exchange, `moved` is 0 here, so the update has the same bits on all devices.
        step = mean / self.denominator(leaf, nu) - moved
        return step, (mu, nu, jnp.zeros_like(moved), jnp.zeros_like(rates)), None


def _index(
    freeze: int, var_scaler: int, local_scaler: int, clipper: int, discard_first: bool
) -> Callable[[Any], Any]:
    """Returns a function from the number of completed updates, perhaps traced, to a stage's index."""
    # `ends`: the last update for each interval (1, 2, 4, ...) between changes of second moments.
    ends, last, interval = [], int(discard_first), 1
    while last < min(freeze, _LAST):
        # Changes are at the multiples of the interval that follow the end of the previous interval.
        last = (last // interval + var_scaler) * interval
        ends.append(min(last, _LAST))
        interval *= 2
    var_ends = np.asarray(ends, np.int32)
    # The intervals between exchanges, and the number of updates after second moments are frozen at
    # which each interval begins.
    intervals = [1]
    while intervals[-1] < clipper:
        intervals.append(min(2 * intervals[-1], clipper))
    begins = np.minimum(local_scaler * np.arange(1, len(intervals)), _LAST).astype(np.int32)
    growth = np.diff(np.asarray(intervals, np.int32))

    def index(count: Any) -> Any:
        update, since = count + 1, count - freeze
        changes = update % (1 << number(var_ends < update).sum()) == 0
        exchanges = update % (1 + (number(since >= begins) * growth).sum()) == 0
        before = number(since < 0)
        after = number(since == 0) * 2 + number(since > 0) * (4 - number(exchanges))
        stage = before * (1 - number(changes)) + (1 - before) * after
        if discard_first:
            first = 4 + (clipper > 1)
            stage = number(count > 0) * stage + number(count == 0) * first
        return stage

    return index
