"""Optimizers whose updates have stages, and which exchange momentum in place of gradients.

Such an optimizer gets the gradient of one device, forms its momentum, and calls `reduce` to sum
that over devices. What an update does is known before it: it depends on the number of updates
alone. So a trainer asks for the stage, see `reducing`, and compiles one program for each.

Without `stage`, as in any loop with Optax, the stage follows from the count in the state, and
gradients are those of all devices together.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import checks, clipping, leafwise, parameters, splits, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.optim.trust_ratio import Readings

Reduce = Callable[[Any], Any]  # a tree of this device to the sum over devices
MaskedRows = Sequence[tuple[str, tuple[int, int]]]


# See `denominator`.
RELATIVE_FLOOR = 0.1
# One bit moves elements with small second moments far, see `denominator`.
REMEDY = (
    "a larger config.optimizer.relative_floor or config.optimizer.eps, a mask by "
    "config.optimizer.mask_unseen and config.optimizer.masked_rows"
)

BY_COUNT = "by count"  # the default of `stage`


class Stage(NamedTuple):
    """Kind of an update.

    Attributes:
      name: as 'warm-up' or 'compressed'.
      local: gradients are this device's share, so that their sum over devices is the gradient.
      reduces: the update calls `reduce`, once.
      resets: what the exchange kept of earlier sums is of another quantity: its residual begins at
        zero in this update.
    """

    name: str
    local: bool = False
    reduces: bool = False
    resets: bool = False


FIRST = Stage("first")  # DeepSpeed's first step: it makes buffers, and its gradient is thrown away
WARM_UP = Stage("warm-up")
COMPRESSED = Stage("compressed", local=True, reduces=True)


class Staged(Reducing):
    """A transform with stages.

    Attributes:
      stages: all stages that there may be.
      stage: a function of the number of completed updates to the stage of the next. `at` has None
        in place of those whose gradients are summed before.
    """

    stages: tuple[Stage, ...]
    stage: Callable[[int], Stage]


class LeavesStep(Protocol):
    """The update of all leaves in one stage."""

    def __call__(
        self,
        stage: Stage,
        leaves: list[Leaf],
        buffers: list[tuple[Any, ...]],
        reduce: Callable[[list[jax.Array]], list[jax.Array]],
    ) -> list[Step]:
        """Returns the step of each leaf.

        Args:
          stage: which one.
          leaves: their gradients are those of one device as if all had the same, where the stage is
            local.
          buffers: of each leaf.
          reduce: gives the means over devices of one array for each leaf.
        """


def leaves_devices_apart(tx: optax.GradientTransformation) -> bool:
    """Returns whether parameters may differ between devices after an update.

    >>> from lamb_tpu import optim
    >>> leaves_devices_apart(optim.zero_one_adam(0.1, local_step_clipper=4))
    True
    """
    checks.check_transform("tx", tx)
    stages = tx.stages if isinstance(tx, Staged) else ()
    return any(stage.local and not stage.reduces for stage in stages)


def transform(
    state_type: type[NamedTuple],
    init_leaf: Callable[[jax.Array, ParameterFacts], tuple[Any, ...]],
    step: LeavesStep,
    stages: tuple[Stage, ...],
    index: Callable[[Any], Any],
    learning_rate: optax.ScalarOrSchedule,
    rules: Rules,
    *,
    clip_global_norm: float | None = None,
    collect: bool = False,
) -> Staged:
    """Returns a transform with stages, made of a function of all leaves.

    Its update is `update(grads, state, params, *, stage, reduce=None, num_devices=1)`. With a stage
    that is local `grads` are this device's share; with `reduce`, a function of a tree like them to
    its sum over `num_devices` devices, momentum is exchanged. Without it this device is the only
    one: nothing is compressed. None is the stage of any update whose gradients are summed before;
    without `stage` the count decides.

    Args:
      state_type: a NamedTuple of `count`, the buffers that `init_leaf` gives, and `readings`.
      init_leaf: the buffers of a leaf before the first update.
      step: the update of all leaves.
      stages: all stages.
      index: from the number of completed updates, an int or traced, to the place among `stages`.
      learning_rate: a number, or a schedule of the count of completed updates.
      rules: see `parameters.resolve`.
      clip_global_norm: see `clipping.clip_global_norm`; in a local stage, as in DeepSpeed, it is
        the norm of the device's own gradient.
      collect: keep `Readings` in the state.
    """
    parameters.check_rules(rules)
    checks.check_flag("collect", collect)
    checks.check_schedule("learning_rate", learning_rate)
    if clip_global_norm is not None:
        clipping.check_max_norm(clip_global_norm)
    num_buffers = len(state_type._fields) - 2

    def columns(treedef: Any, rows: list[tuple], width: int) -> list[Any]:
        return [treedef.unflatten(c) for c in (zip(*rows) if rows else ((),) * width)]

    def init_fn(params: optax.Params) -> Any:
        facts = parameters.resolve(params, rules)
        leaves, treedef = jax.tree.flatten(params)
        rows = [
            init_leaf(param, fact)
            for param, fact in zip(leaves, jax.tree.leaves(facts), strict=True)
        ]
        readings = trust_ratio.initial_readings(params, facts) if collect else None
        buffers = columns(treedef, rows, num_buffers)
        return state_type._make((jnp.zeros((), jnp.int32), *buffers, readings))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params = None,
        *,
        stage: Any = BY_COUNT,
        reduce: Reduce | None = None,
        num_devices: int = 1,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        grads = checks.gradient_leaves(updates, params)
        checks.check_state(state, state_type)
        if reduce is not None and not isinstance(stage, Stage):
            raise ValueError(f"stage must be that of the update where reduce is, not {stage!r}")
        treedef = jax.tree.structure(params)
        try:
            buffers = [treedef.flatten_up_to(tree) for tree in state[1 : 1 + num_buffers]]
        except ValueError as error:
            raise ValueError(f"state is that of another tree than params: {error}") from None
        rate = leafwise.value_at(learning_rate, state.count)
        count = optax.safe_increment(state.count)
        rows = list(zip(*buffers)) if grads else []
        params_leaves = jax.tree.leaves(params)
        facts = jax.tree.leaves(parameters.resolve(params, rules))
        paths = parameters.leaf_paths(params)

        def means(values: list[jax.Array]) -> list[jax.Array]:
            if reduce is None:
                return values
            return jax.tree.leaves(reduce(treedef.unflatten([v / num_devices for v in values])))

        def run(stage: Stage) -> list[Step]:
            if stage == FIRST:
                return [
                    (jnp.zeros(np.shape(p), trust_ratio.compute_dtype(p)), old, None)
                    for p, old in zip(params_leaves, rows, strict=True)
                ]
            wide = [
                g.astype(trust_ratio.compute_dtype(p))
                for g, p in zip(grads, params_leaves, strict=True)
            ]
            if stage.local:
                wide = [num_devices * g for g in wide]
            if clip_global_norm is not None:
                scale = clipping.global_scale(treedef.unflatten(wide), clip_global_norm)
                wide = [g * scale.astype(trust_ratio.real_dtype(g)) for g in wide]
            leaves = []
            for i, (path, param, grad, fact) in enumerate(
                zip(paths, params_leaves, wide, facts, strict=True)
            ):
                own = jnp.asarray(rate, trust_ratio.real_dtype(param)) * fact.rate_factor
                leaves.append(
                    Leaf(
                        grad,
                        jnp.asarray(param, grad.dtype),
                        fact,
                        own,
                        state.count,
                        i,
                        count,
                        path,
                        splits.whole(np.shape(param)),
                    )
                )
            return step(stage, leaves, rows, means)

        def finished(stage: Stage) -> tuple[list[jax.Array], list[tuple], list[Any]]:
            steps = run(stage)
            narrow = [
                u.astype(jnp.result_type(p))
                for (u, _, _), p in zip(steps, params_leaves, strict=True)
            ]
            read = (
                [
                    trust_ratio.leaf_readings(
                        ratio, u, jnp.asarray(p, trust_ratio.compute_dtype(p)), fact, None
                    )
                    for (u, _, ratio), p, fact in zip(steps, params_leaves, facts, strict=True)
                ]
                if collect
                else []
            )
            return narrow, [tuple(new) for _, new, _ in steps], read

        possible = [i for i, one in enumerate(stages) if stage == BY_COUNT or not one.local]
        if isinstance(stage, Stage):
            steps, new, read = finished(stage)
        elif len(possible) == 1:
            steps, new, read = finished(stages[possible[0]])
        elif not isinstance(state.count, jax.core.Tracer):
            # Outside jit the count is known.
            steps, new, read = finished(stages[int(index(state.count))])
        else:
            places = [possible.index(i) if i in possible else 0 for i in range(len(stages))]
            branches = [lambda i=i: finished(stages[i]) for i in possible]
            steps, new, read = jax.lax.switch(jnp.asarray(places)[index(state.count)], branches)
        readings: Readings | None = trust_ratio.readings_of(treedef, read) if collect else None
        new_buffers = columns(treedef, new, num_buffers)
        return treedef.unflatten(steps), state_type._make((count, *new_buffers, readings))

    def stage_of(update: int) -> Stage:
        return stages[int(index(update))]

    def at(update: int) -> Stage | None:
        return stage_of(update) if stage_of(update).local else None

    tx = Staged(init_fn, update_fn, at)
    tx.stages, tx.stage = stages, stage_of
    return tx


def frozen_after(freeze_step: int, discard_first: bool) -> tuple[tuple[Stage, ...], Callable]:
    """Stages of an optimizer with one warm-up, and the index of an update's stage among them."""
    checks.check_whole("freeze_step", freeze_step, lowest=1)
    checks.check_flag("discard_first", discard_first)
    if discard_first:
        return (FIRST, WARM_UP, COMPRESSED), lambda c: number(c > 0) + number(c >= freeze_step)
    return (WARM_UP, COMPRESSED), lambda c: number(c >= freeze_step)


def number(flag: Any) -> Any:
    """Returns 1 for True and 0 for False, of an array in int32: no promotion adds a flag."""
    return flag.astype(np.int32) if hasattr(flag, "astype") else int(flag)


def denominator(
    nu: jax.Array, facts: ParameterFacts, eps: float | jax.Array, relative_floor: float | jax.Array
) -> jax.Array:
    r"""Returns the root of second moments, at least a fraction of their layer's, plus `eps`.

    One bit gives all elements of a leaf momentum of one size s, the leaf's root mean square, with
    either sign. An element whose root is a thousandth of its layer's then moves a thousand times as
    far as the others, whatever its gradient: the error feedback takes that back later, but the loss
    has exploded by then. With the fraction 0.1 no element moves more than ten times as far as one
    with the layer's mean second moment. Elements below the floor, such as rows of rare words, learn
    more slowly than in Adam. A mask in its place would stop them for the rest of the run.

    On configs/digits.py, one seed, `onebit_adam` ends with parameters of the norm 47 at a floor of
    0.01, 22 at 0.1 and 21 at 1, where Adam has 19, and with a training loss of 0.0026, 0.0026 and
    0.0043. A mask below the same 0.1 in its place has 22 and 0.0026.

    Args:
      nu: second moments of a leaf.
      facts: its `layer_axes` say what a layer is.
      eps: added to the root.
      relative_floor: the fraction of the root of the layer's mean second moment; 0: no floor.
    """
    root = trust_ratio.root(nu)
    if isinstance(relative_floor, jax.Array) or relative_floor > 0:
        layer = trust_ratio.root(trust_ratio.leaf_mean(nu, facts))
        root = jnp.maximum(root, (relative_floor * layer).astype(root.dtype))
    return root + eps


def check_floor(relative_floor: Any) -> None:
    """Raises ValueError unless the fraction of `denominator` is in [0, 1)."""
    checks.check_range("relative_floor", relative_floor, upper=1.0)


def check_mask(mask_unseen: Any, masked_rows: Any) -> None:
    """Raises ValueError for arguments that `mask` does not take."""
    checks.check_flag("mask_unseen", mask_unseen)
    pairs = isinstance(masked_rows, (tuple, list)) and all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], (tuple, list))
        and len(pair[1]) == 2
        and all(type(row) is int for row in pair[1])
        and 0 <= pair[1][0] < pair[1][1]
        for pair in masked_rows
    )
    if not pairs:
        raise ValueError(
            "masked_rows must be pairs (regular expression over paths, (first row, row after the "
            f"last)), as (('position_embeddings', (128, 512)),), not {masked_rows!r}"
        )
    parameters.check_rules([(pattern, {}) for pattern, _ in masked_rows])


def masked(
    values: jax.Array, leaf: Leaf, nu: jax.Array, mask_unseen: bool, masked_rows: MaskedRows
) -> jax.Array:
    """Sets to 0 what one bit cannot say to be 0: momentum of elements that have no gradient.

    Args:
      values: the leaf's momentum, or its compressed gradient.
      leaf: whose path the rules of `masked_rows` are searched in.
      nu: its second moments.
      mask_unseen: elements whose second moment is 0 are 0.
      masked_rows: pairs (regex, (first row, row after the last)); rows are along the first axis
        that stacks no layers.
    """
    if mask_unseen:
        values = jnp.where(nu == 0, 0.0 * values, values)
    for pattern, (first, last) in masked_rows:
        if not parameters.matches(pattern, leaf.path):
            continue
        axes = [axis for axis in range(values.ndim) if axis not in leaf.facts.layer_axes]
        if not axes or values.shape[axes[0]] < last:
            raise ValueError(
                f"masked_rows has the rows {(first, last)} for the parameter {leaf.path!r}, whose "
                f"shape is {values.shape}"
            )
        row = jnp.arange(values.shape[axes[0]])
        kept = (row < first) | (row >= last)
        shape = [1] * values.ndim
        shape[axes[0]] = -1
        values = jnp.where(kept.reshape(shape), values, 0.0)
    return values
