r"""AGVM: a learning rate for each module of a network, so that their gradients vary alike.

In a detector trained with a large batch the gradients of backbone, neck and heads vary unequally.
AGVM compares the mean gradients of two halves of the batch, module by module, and slows down the
modules whose halves differ more than those of one module, the anchor; it speeds up the others. It
wraps any optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, modules, schedule_free, trust_ratio
from lamb_tpu.optim.trust_ratio import AxisName


class AgvmState(NamedTuple):
    """State of `agvm`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    factors: jax.Array  # float32, (num_modules,): smoothed; 1 at the start
    targets: jax.Array  # float32, (num_modules,): the last that were not smoothed; 1 at the start
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
    r"""Multiplies the updates of each module by a factor from the similarity of two half gradients.

    With the mean gradients :math:`a_m, b_m` of both halves of the batch, of all leaves of a module
    :math:`m` together, and the anchor, module 0 or `anchor`, every `interval` updates:

    .. math::
      \phi_m &= 1 - \cos(a_m, b_m) \\
      \mu_m &= \sqrt{\mathrm{clip}\left(\frac{\phi_0 + \epsilon}{\phi_m + \epsilon}, l, u\right)} \\
      s_m &\leftarrow \alpha s_m + (1 - \alpha) \mu_m

    Each update from `start` to `stop` is :math:`s_m` times that of `inner`, also those in between.
    What `inner` multiplies by the learning rate is so multiplied as well, as decoupled weight
    decay; a momentum that holds steps with their rates, as in `lars`, is left alone. The anchor's
    factor is 1.

    >>> import optax
    >>> params = {'backbone': jnp.ones(2), 'head': jnp.ones(2)}
    >>> tx = agvm(optax.sgd(0.1), ['backbone', 'head'], interval=1, start=0, momentum=0.0)
    >>> a = {'backbone': jnp.array([1., 0.]), 'head': jnp.array([2., 1.])}
    >>> b = {'backbone': jnp.array([1., 1.]), 'head': jnp.array([-1., 2.])}
    >>> grads = jax.tree.map(lambda x, y: (x + y) / 2, a, b)
    >>> updates, state = tx.update(grads, tx.init(params), params, halves=(a, b))
    >>> print(state.factors.round(4))  # the cosines are 0.7071 and 0: the clip binds at 0.5
    [1.     0.7071]
    >>> print(updates['head'].round(4))
    [-0.0354 -0.1061]

    Args:
      inner: the optimizer.
      module_rules: regular expressions over '/'-joined paths; the first that matches a leaf is its
        module, and every leaf needs one.
      interval: updates from one measurement to the next; 5 in the authors' code.
      start: completed updates before the first measurement, best behind the warm-up; 500 there.
      stop: completed updates at the last update that is scaled; None for no end. Updates at
        `start` and `stop` themselves are scaled.
      momentum: :math:`\alpha`, in [0, 1); 0.97 there.
      bounds: :math:`l, u`, of the ratio before the root, so that factors lie in [0.71, 3.16].
      eps: :math:`\epsilon`.
      second_moment: for Adam and its kin, a function of the state of `inner` to its second moments
        :math:`v`, a tree as the parameters', as `lambda state: state[0].nu`. Each half h is then
        divided by :math:`\sqrt{\beta_2 v + (1 - \beta_2) h^2}` plus `eps_root` before the cosine,
        without a correction for the start of v. (The authors' code does so with h the half's mean
        over the number of workers, and with v of the mean gradient.)
      b2: :math:`\beta_2` of `inner`, for `second_moment`.
      eps_root: see there.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.
      anchor: the index of the anchor among the modules.

    Returns:
      A transform whose `update` needs `params`, and takes `halves=(a, b)`: the mean gradients of
      the halves of the batch, each a tree as the updates. Without them, or between measurements,
      factors stay: a step that measures nothing need not make halves.

    Raises:
      ValueError: for an argument that is out of range, naming it; from `init`, for a leaf that no
        module matches, a module without a leaf, second moments that are not those of the
        parameters, and an optimizer without a learning rate of its own steps, as schedule-free.

    References:
      Xue et al., Large-batch Optimization for Dense Visual Predictions, arXiv:2210.11078; the
      authors' code, Sense-X/AGVM, was read.
    """
    checks.check_transform("inner", inner)
    modules.check("module_rules", module_rules)
    checks.check_whole("anchor", anchor)
    if anchor >= len(module_rules):
        raise ValueError(f"anchor must be below {len(module_rules)}, the modules, not {anchor!r}")
    checks.check_whole("interval", interval, lowest=1)
    checks.check_whole("start", start)
    if stop is not None:
        checks.check_whole("stop", stop, lowest=start)
    checks.check_range("momentum", momentum, 1.0)
    checks.check_bounds("bounds", bounds)
    checks.check_above_zero(eps=eps)
    checks.check_range("b2", b2, 1.0)
    checks.check_range("eps_root", eps_root)
    if second_moment is not None and not callable(second_moment):
        raise ValueError(
            "second_moment must be a function of the state of inner, or None, not "
            f"{second_moment!r}"
        )
    checks.check_axis_name(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> AgvmState:
        checks.check_arrays("params", params)
        modules.assign(params, module_rules)
        inner_state = inner.init(params)
        if schedule_free.keeps_evaluation_params(inner_state):
            raise ValueError(
                "agvm scales updates, and the weights that schedule_free_adamw evaluates follow "
                "from updates that are not scaled; wrap another optimizer"
            )
        if second_moment is not None:
            checks.check_moments("second_moment gives", second_moment(inner_state), params)
        # Two arrays, for one that stands twice in a state cannot be donated.
        factors, targets = (jnp.ones(len(module_rules), jnp.float32) for _ in range(2))
        return AgvmState(jnp.zeros((), jnp.int32), factors, targets, inner_state)

    def update_fn(
        updates: optax.Updates,
        state: AgvmState,
        params: optax.Params = None,
        *,
        halves: tuple[Any, Any] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AgvmState]:
        checks.gradient_leaves(updates, params)
        checks.check_state(state, AgvmState)
        index = modules.assign(updates, module_rules)
        active = state.count >= start
        if stop is not None:
            active &= state.count <= stop
        factors, targets = state.factors, state.targets
        if halves is not None:
            if second_moment is not None:
                moments = second_moment(state.inner_state)
                halves = tuple(_preconditioned(half, moments, b2, eps_root) for half in halves)
            sums = modules.products(*halves, module_rules, axis_name)
            apart = modules.one_minus_cosine(sums) + eps
            found = jnp.sqrt(jnp.clip(apart[anchor] / apart, *bounds))
            due = active & (state.count % interval == 0)
            targets = jnp.where(due, found, targets)
            factors = jnp.where(due, momentum * factors + (1 - momentum) * found, factors)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        leaves, treedef = jax.tree.flatten(updates)
        applied = jnp.where(active, factors, 1.0)
        scaled = [
            (applied[module] * leaf.astype(trust_ratio.compute_dtype(leaf))).astype(leaf.dtype)
            for module, leaf in zip(index, leaves, strict=True)
        ]
        count = optax.safe_increment(state.count)
        return treedef.unflatten(scaled), AgvmState(count, factors, targets, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _preconditioned(half: Any, moments: Any, b2: float, eps: float) -> Any:
    """The half divided by the root of Adam's second moments with its own squares in them."""
    return jax.tree.map(
        lambda h, v: h / (jnp.sqrt(b2 * v + (1 - b2) * trust_ratio.real_product(h, h)) + eps),
        half,
        moments,
    )
