r"""0/1 Adam: gradients in one bit a value from the start, and second moments that change rarely.

Second moments change at intervals that double, with the whole gradient; the updates between send
the gradient compressed. After their freezing what is sent is the way of the parameters, so that
devices may take several steps of their own between two exchanges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import chains, checks, leafwise, parameters, staged, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.onebit_adam import direction
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.staged import FIRST, MaskedRows, Stage, number
from lamb_tpu.optim.trust_ratio import Readings

VARIANCE = Stage("variance")
GRADIENT = Stage("gradient", local=True, reduces=True)
FIRST_SYNC = Stage("first synchronisation", local=True, reduces=True, resets=True)
SYNC = Stage("synchronisation", local=True, reduces=True)
LOCAL = Stage("local step", local=True)
_LAST = 2**31 - 1


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: the parameters' shapes, float32; of this device between exchanges
    nu: Any  # second moments: the same shapes
    moved: Any  # the sum of this device's updates since the last exchange: the same shapes
    rates: Any  # of each leaf, (): the sum of the learning rates since the last exchange
    readings: Readings | None

    @property
    def remedy(self) -> str:
        """Advice for a run that diverges."""
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
    r"""Adam without bias correction, with second moments that change at doubling intervals.

    With :math:`u_t = m_t / (\sqrt v + \epsilon) + \lambda w_{t-1}` every update is
    :math:`w_t = w_{t-1} - \eta u_t`. Update t is one of these:

    - t is a multiple of the interval: both moments take the gradient, which is sent whole;
    - otherwise, up to `var_freeze_step`: :math:`m` takes the gradient, which is sent compressed;
    - afterwards :math:`m` takes the device's own gradient. When t is a multiple of the second
      interval the devices' ways :math:`-\sum \eta u` since the last time are exchanged, times
      :math:`\sqrt v + \epsilon`; parameters go back and take the mean way, and :math:`m` becomes
      what was exchanged over :math:`-\sum \eta`.

    >>> stage = zero_one_adam(
    ...     0.1, var_freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=2,
    ... ).stage
    >>> [stage(update).name for update in range(5)]
    ['variance', 'variance', 'gradient', 'variance', 'gradient']
    >>> [stage(update).name for update in range(5, 10)]  # 5: multiples of 2, then of 4
    ['variance', 'first synchronisation', 'synchronisation', 'local step', 'synchronisation']

    Args:
      learning_rate: :math:`\eta`, a number or a schedule of the count of completed updates.
      var_freeze_step: updates after which second moments are frozen; about the length of the
        learning rate's warm-up. DeepSpeed's is one less.
      var_update_scaler: changes of the second moments until their interval doubles.
      local_step_scaler: updates until the interval between exchanges doubles.
      local_step_clipper: the longest interval between exchanges. Above 1, parameters differ between
        devices in between; 16 in DeepSpeed.
      b1: :math:`\beta_1`, in [0, 1).
      b2: :math:`\beta_2`, in [0, 1).
      eps: :math:`\epsilon`.
      weight_decay: :math:`\lambda`, a number or a schedule. As in DeepSpeed, after the freezing the
        decay is part of the way, and so of the momentum.
      relative_floor: :math:`\sqrt v` in the denominator is at least this fraction of the root of
        its layer's mean :math:`v`; in [0, 1), 0 for none, as in DeepSpeed. See
        `staged.denominator`.
      mask_unseen: what is exchanged compressed is 0 for elements whose second moment is 0. One bit
        cannot say 0.
      masked_rows: rows for which it is 0, such as position embeddings beyond the sequence length:
        pairs (regex over paths, (first row, row after the last)).
      discard_first: throw the first gradient away, as DeepSpeed does: that update, which makes its
        buffers, counts, and changes nothing else.
      rules: which leaves decay, see `parameters.resolve`.
      clip_global_norm: the norm above which gradients are scaled down to it, of the device's own
        where they are not sent whole.
      collect: keep each layer's norms in the state, see `readings.read`.

    Raises:
      ValueError: for an argument that is out of range, naming it.

    References:
      Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam,
      arXiv:2202.06009; ZeroOneAdam of DeepSpeed, which has no bias correction either.
    """
    chains.check_numbers(learning_rate, weight_decay, {"b1": b1, "b2": b2}, eps=eps)
    checks.check_whole("var_freeze_step", var_freeze_step, lowest=1)
    checks.check_whole("var_update_scaler", var_update_scaler, lowest=1)
    checks.check_whole("local_step_scaler", local_step_scaler, lowest=1)
    checks.check_whole("local_step_clipper", local_step_clipper, lowest=1)
    checks.check_static(  # they decide the stages, which are programs
        var_freeze_step=var_freeze_step,
        var_update_scaler=var_update_scaler,
        local_step_scaler=local_step_scaler,
        local_step_clipper=local_step_clipper,
    )
    checks.check_flag("discard_first", discard_first)
    staged.check_mask(mask_unseen, masked_rows)
    staged.check_floor(relative_floor)

    def init_leaf(param: jax.Array, facts: ParameterFacts) -> tuple[jax.Array, ...]:
        rates = jnp.zeros((), trust_ratio.real_dtype(param))
        return (
            leafwise.zeros_like(param),
            leafwise.zero_squares(param),
            leafwise.zeros_like(param),
            rates,
        )

    def averaged(mu: jax.Array, grad: jax.Array) -> jax.Array:
        return b1 * mu + (1 - b1) * grad

    def masked(leaf: Leaf, values: jax.Array, nu: jax.Array) -> jax.Array:
        return staged.masked(values, leaf, nu, mask_unseen, masked_rows)

    def update(leaf: Leaf, mu: jax.Array, nu: jax.Array) -> jax.Array:
        return -leaf.rate * direction(leaf, mu, denominator(leaf, nu), weight_decay)

    def denominator(leaf: Leaf, nu: jax.Array) -> jax.Array:
        # Of changes of the second moments too: momentum already holds gradients of one bit.
        return staged.denominator(nu, leaf.facts, eps, relative_floor)

    def variance(leaf: Leaf, buffers: tuple) -> Step:
        mu, nu, moved, rates = buffers
        nu = b2 * nu + (1 - b2) * trust_ratio.real_product(leaf.grad, leaf.grad)
        mu = averaged(mu, leaf.grad)
        return update(leaf, mu, nu), (mu, nu, moved, rates), None

    def gradient(leaf: Leaf, grad: jax.Array, buffers: tuple) -> Step:
        mu, nu, moved, rates = buffers
        mu = averaged(mu, masked(leaf, grad, nu))
        return update(leaf, mu, nu), (mu, nu, moved, rates), None

    def local(leaf: Leaf, buffers: tuple) -> Step:
        mu, nu, moved, rates = buffers
        mu = averaged(mu, leaf.grad)
        own = update(leaf, mu, nu)
        return own, (mu, nu, moved + own, rates + leaf.rate), None

    def synchronised(leaf: Leaf, way: jax.Array, rates: jax.Array, before: tuple) -> Step:
        _, nu, moved, _ = before
        way = masked(leaf, way, nu)
        # Where the rates were 0 nothing moved, and the momentum starts anew.
        mu = -way / jnp.where(rates > 0, rates, 1.0)
        # The own way back and the common one. With one step between exchanges `moved` is 0, so that
        # the update has the same bits on all devices.
        common = way / denominator(leaf, nu) - moved
        return common, (mu, nu, jnp.zeros_like(moved), jnp.zeros_like(rates)), None

    def step(stage: Stage, leaves: list[Leaf], buffers: list[tuple], reduce: Any) -> list[Step]:
        pairs = list(zip(leaves, buffers, strict=True))
        if stage == VARIANCE:
            return [variance(leaf, old) for leaf, old in pairs]
        if stage == GRADIENT:
            grads = reduce([leaf.grad for leaf in leaves])
            return [gradient(leaf, g, old) for (leaf, old), g in zip(pairs, grads, strict=True)]
        steps = [local(leaf, old) for leaf, old in pairs]
        if stage == LOCAL:
            return steps
        own = [new for _, new, _ in steps]
        ways = reduce(
            [
                moved * denominator(leaf, nu)
                for leaf, (_, nu, moved, _) in zip(leaves, own, strict=True)
            ]
        )
        return [
            synchronised(leaf, way, new[-1], old)
            for (leaf, old), way, new in zip(pairs, ways, own, strict=True)
        ]

    # With an interval of 1 every update after the freezing is an exchange.
    stages: tuple[Stage, ...] = (VARIANCE, GRADIENT, FIRST_SYNC, SYNC)
    stages += (LOCAL,) * (local_step_clipper > 1) + (FIRST,) * discard_first
    index = _index(
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper, discard_first
    )
    return staged.transform(
        ZeroOneAdamState,
        init_leaf,
        step,
        stages,
        index,
        learning_rate,
        rules,
        clip_global_norm=clip_global_norm,
        collect=collect,
    )


def _index(
    freeze: int, var_scaler: int, local_scaler: int, clipper: int, discard_first: bool
) -> Callable[[Any], Any]:
    """Returns the function from the number of completed updates, traced or not, to the stage."""
    # The last update of each interval between changes of second moments: 1, 2, 4 and so on.
    ends, last, interval = [], int(discard_first), 1
    while last < min(freeze, _LAST):
        # The multiples of the interval after the last of the one before.
        last = (last // interval + var_scaler) * interval
        ends.append(min(last, _LAST))
        interval *= 2
    var_ends = np.asarray(ends, np.int32)
    # The intervals between exchanges, and how many updates after the freezing each begins.
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
        found = before * (1 - number(changes)) + (1 - before) * after
        if discard_first:
            place = 4 + (clipper > 1)
            found = number(count > 0) * found + number(count == 0) * place
        return found

    return index
