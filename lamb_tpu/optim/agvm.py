r"""AGVM: scales the learning rate of each module of a network to balance gradient variance.

In a detector trained with a large batch, the gradients of backbone, neck and heads have different
variance. For each module, AGVM compares the mean gradients of two halves of the batch. If these
two gradients differ more than those of a reference module, the anchor, AGVM slows the module down;
if they differ less, AGVM speeds the module up. AGVM wraps another optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, modules, schedule_free, trust_ratio
from lamb_tpu.optim.parameters import PyTree
from lamb_tpu.optim.trust_ratio import AxisName


class AgvmState(NamedTuple):
    """State of `agvm`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    factors: jax.Array  # float32, (num_modules,): the smoothed factors; 1 at the start
    targets: jax.Array  # float32, (num_modules,): the last factors before smoothing; 1 at the start
    inner_state: optax.OptState


def agvm(
    inner: optax.GradientTransformation,
    module_rules: Sequence[str],
    interval: int = 5,
    start: int = 500,
    stop: int | None = None,
    momentum: float = 0.97,
    bounds: tuple[float, float] = (0.5, 10.0),
    eps: float = 1e-6,
    second_moment: Callable[[optax.OptState], Any] | None = None,
    b2: float = 0.999,
    eps_root: float = 1e-8,
    axis_name: AxisName = None,
    anchor: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each module's updates by a factor that depends on the gradients of two batch halves.

    Let :math:`a_m, b_m` be the mean gradients of the two halves of the batch, for all leaves of
    module :math:`m`. Module 0 is the anchor, unless `anchor` is the index of another module. Every
    `interval` updates:

    .. math::
      \phi_m &= 1 - \cos(a_m, b_m) \\
      \mu_m &= \sqrt{\mathrm{clip}\left(\frac{\phi_0 + \epsilon}{\phi_m + \epsilon}, l, u\right)} \\
      s_m &\leftarrow \alpha s_m + (1 - \alpha) \mu_m

    Every update from `start` to `stop` (inclusive), even between measurements, is :math:`s_m` times the
    update of `inner`. The factor therefore scales everything that `inner` multiplies by the learning rate,
    such as decoupled weight decay. The factor does not enter the momentum of `inner`, even if this
    momentum accumulates steps that include the rate, as in `lars`. The factor of the anchor is 1.

    >>> import optax
    >>> params = {'backbone': jnp.ones(2), 'head': jnp.ones(2)}
    >>> tx = agvm(optax.sgd(0.1), ['backbone', 'head'], interval=1, start=0, momentum=0.0)
    >>> a = {'backbone': jnp.array([1., 0.]), 'head': jnp.array([2., 1.])}
    >>> b = {'backbone': jnp.array([1., 1.]), 'head': jnp.array([-1., 2.])}
    >>> grads = jax.tree.map(lambda x, y: (x + y) / 2, a, b)
    >>> updates, state = tx.update(grads, tx.init(params), params, halves=(a, b))
    >>> print(state.factors.round(4))  # (1 - 0.7071) / (1 - 0) is clipped to 0.5
    [1.     0.7071]
    >>> print(updates['head'].round(4))
    [-0.0354 -0.1061]

    Args:
      inner: the optimizer.
      module_rules: one regular expression per module, over '/'-joined paths. A leaf belongs to the
        first module that matches its path; every leaf must belong to a module.
      interval: updates between two measurements; 5 in the authors' code.
      start: the number of completed updates from which the factors are measured and applied, best
        after the warm-up; 500 in the authors' code.
      stop: the number of completed updates before the last scaled update; None for no end.
      momentum: :math:`\alpha`, in [0, 1); 0.97 in the authors' code.
      bounds: :math:`l, u`, the bounds of the ratio under the root. With the defaults, factors are
        in [0.71, 3.16].
      eps: :math:`\epsilon`.
      second_moment: for Adam-like optimizers, a function from the state of `inner` to the second
        moments :math:`v`, a tree like the parameters, for example `lambda state: state[0].nu`.
        Before the cosine is computed, the mean gradient h of each half is then divided by
        :math:`\sqrt{\beta_2 v + (1 - \beta_2) h^2}` plus `eps_root`, without bias correction of v.
        (In the authors' code h is also divided by the number of workers, while v comes from the
        mean gradient.) None to compare the gradients themselves.
      b2: :math:`\beta_2` of `inner`; only used with `second_moment`.
      eps_root: added to the root; only used with `second_moment`.
      axis_name: see `lamb_tpu.optim`.
      anchor: the index of the anchor among the modules.

    Returns:
      A transform whose `update` needs `params` and takes `halves=(a, b)`, the mean gradients of the
      two halves of the batch, each a tree like the updates. Without `halves` an update does not
      measure, so the factors do not change. Updates between measurements do not need `halves`.

    Raises:
      ValueError: an argument is out of range; from `init`: no module matches a leaf, a module has
        no leaf, the second moments do not match the parameters, or `inner` is schedule-free.

    References:
      Xue et al., Large-batch Optimization for Dense Visual Predictions, arXiv:2210.11078; the
      authors' code, Sense-X/AGVM, was read.
    """
    given = checks.checked(agvm, locals())
    checks.check_transform("inner", inner)
    modules.check("module_rules", module_rules)
    if anchor >= len(module_rules):
        raise ValueError(
            f"anchor={anchor!r} must be below {len(module_rules)}, the number of modules"
        )
    if stop is not None:
        checks.check_whole("stop", stop, lowest=start)
    checks.check_above_zero(eps=eps)
    if second_moment is not None and not callable(second_moment):
        raise ValueError(
            f"second_moment={second_moment!r} must be a function of the state of inner, or None"
        )
    scaled = _Scaled(**given | {"inner": optax.with_extra_args_support(inner)})
    return optax.GradientTransformationExtraArgs(scaled.init, scaled.update)


class _Scaled(leafwise.Arguments):
    """Implementation of `agvm`; its attributes are the arguments."""

    def init(self, params: optax.Params) -> AgvmState:
        checks.check_arrays("params", params)
        modules.assign(params, self.module_rules)
        inner_state = self.inner.init(params)
        if schedule_free.keeps_evaluation_params(inner_state):
            raise ValueError(
                "agvm cannot wrap schedule_free_adamw, whose evaluation weights would miss the "
                "factors; wrap another optimizer"
            )
        if self.second_moment is not None:
            moments = self.second_moment(inner_state)
            checks.check_moments("second_moment returns", moments, params)
        # Two arrays: a state that contains an array twice cannot be donated.
        factors, targets = (jnp.ones(len(self.module_rules), jnp.float32) for _ in range(2))
        return AgvmState(jnp.zeros((), jnp.int32), factors, targets, inner_state)

    def update(
        self,
        updates: optax.Updates,
        state: AgvmState,
        params: optax.Params = None,
        *,
        halves: tuple[Any, Any] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AgvmState]:
        checks.gradient_leaves(updates, params)
        checks.check_state(state, AgvmState)
        index = modules.assign(updates, self.module_rules)
        active = state.count >= self.start
        if self.stop is not None:
            active &= state.count <= self.stop
        factors, targets = state.factors, state.targets
        if halves is not None:
            measured = self.measured(halves, state.inner_state)
            due = active & (state.count % self.interval == 0)
            targets = jnp.where(due, measured, targets)
            smoothed = self.momentum * factors + (1 - self.momentum) * measured
            factors = jnp.where(due, smoothed, factors)
        updates, inner_state = self.inner.update(updates, state.inner_state, params, **extra_args)
        scaled = _times(jnp.where(active, factors, 1.0), index, updates)
        count = optax.safe_increment(state.count)
        return scaled, AgvmState(count, factors, targets, inner_state)

    def measured(self, halves: tuple[Any, Any], inner_state: optax.OptState) -> jax.Array:
        """Returns each module's factor before smoothing, from the gradients of two halves."""
        if self.second_moment is not None:
            moments = self.second_moment(inner_state)
            halves = tuple(
                _preconditioned(half, moments, self.b2, self.eps_root) for half in halves
            )
        sums = modules.products(*halves, self.module_rules, self.axis_name)
        distances = modules.one_minus_cosine(sums) + self.eps
        return jnp.sqrt(jnp.clip(distances[self.anchor] / distances, *self.bounds))


def _times(factors: jax.Array, index: Sequence[int], updates: optax.Updates) -> optax.Updates:
    leaves, treedef = jax.tree.flatten(updates)
    return treedef.unflatten(
        (factors[module] * leaf.astype(trust_ratio.compute_dtype(leaf))).astype(leaf.dtype)
        for module, leaf in zip(index, leaves, strict=True)
    )


def _preconditioned(half: Any, moments: PyTree, b2: float, eps: float) -> Any:
    """Divides a half's gradient by the root of the second moments, updated with the gradient's squares."""
    return jax.tree.map(
        lambda h, v: h / (jnp.sqrt(b2 * v + (1 - b2) * trust_ratio.real_product(h, h)) + eps),
        half,
        moments,
    )
