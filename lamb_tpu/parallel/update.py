"""One update in three parts, `accumulate -> exchange -> apply`, written once for both backends.

- `accumulate`: the gradient of the rows that a program sees, from their microbatches.
- `exchange`: the sum over devices of that gradient, or of the message that an optimizer sends
  instead, see `optim.reducing`.
- `apply`: the optimizer's step, the components of the state, and the metrics.

`make_update` combines all three for one batch. `parallel.microbatched` accumulates one microbatch
after the other, with statistics of their gradients, and calls `exchange` and `apply`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import layout as layout_lib
from jax.sharding import Mesh

from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel import accumulation, backends
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.components import RESIDUAL, StateComponent, Update
from lamb_tpu.parallel.gradient_statistics import MicrobatchStatistics
from lamb_tpu.parallel.state import PARTS, TrainState
from lamb_tpu.tasks import Sums, Task
from lamb_tpu.types import Batch, Params, PyTree

Backend = backends.JitBackend | backends.ShardMapBackend


class Gradients(NamedTuple):
    """Results of the accumulation over a program's rows; the first four fields are summed over devices."""

    grads: PyTree  # the gradient of these rows' share of the loss
    loss: jax.Array  # these rows' share of the loss
    sums: Sums  # the task's metric sums
    # Sums for statistics of gradients, see `MicrobatchStatistics.shares`; {} without statistics.
    shares: Mapping[str, Any]
    # The new model state, equal on all devices, because BatchNorm takes its statistics over devices.
    # In a running total of microbatches: the moments of BatchNorm layers, see `norm.add_moments`.
    model_state: PyTree
    rows: Mapping[str, jax.Array]  # the new value of each carried field, by the component's name
    measured: Sums  # metrics measured before the exchange


class Exchanged(NamedTuple):
    """Results of an exchange: sums over all examples."""

    sent: Any  # sum of the gradients, or of the messages, sharded like the optimizer's state
    residual: PyTree  # the new residual of the exchange; () without a residual
    loss: jax.Array  # loss of the batch
    sums: Sums  # the task's metric sums
    not_finite: jax.Array | None  # see `JitBackend.not_finite`
    params: Params  # parameters before the update, sharded like the optimizer's state
    # Components of the state before the update; the residual is reset if the stage asks for it.
    parts: Mapping[str, Any]
    # Function from the summed message in `sent` to `(updates, opt_state)`; None for a gradient.
    apply: Callable[[Any], tuple[Any, Any]] | None


def accumulate(
    task: Task,
    backend: Backend,
    parts: Sequence[StateComponent],
    state: TrainState,
    batch: Batch,
    steps: int = 1,
) -> Gradients:
    """Returns the gradient of the rows that a program sees, from `steps` microbatches.

    Each term of the loss is divided by its weight over all microbatches and devices, which is known
    from the batch before the backward pass.
    """
    rows = len(next(iter(batch.values())))
    fields = {part.name: part.field(state.parts[part.name]) for part in parts}
    carried = {name: field for name, field in fields.items() if field is not None}
    # The key is a function of the step, so a resumed run draws the same numbers as an uninterrupted
    # one.
    grads, loss, model_state, sums = accumulation.gradients(
        task,
        backend.whole_params(state.params),
        state.model_state,
        {**batch, **carried},
        # Weights of the full batch: the loss is divided by them once, before it is summed.
        backend.add(task.weights(batch)),
        jax.random.fold_in(state.key, state.step),
        backend.positions(rows, steps),
        steps,
        backend.num_shards,
        backend.batch_sharding,
        carried,
    )
    grads = row_major(grads, backend.layout.mesh)
    new_rows = {name: model_state[name] for name in carried}
    if carried:
        model_state = {k: v for k, v in model_state.items() if k not in carried}
    return Gradients(grads, loss, sums, {}, model_state, new_rows, {})


def exchange(
    tx: optax.GradientTransformation,
    backend: Backend,
    state: TrainState,
    gradients: Gradients,
    stage: Hashable = None,
) -> Exchanged:
    """Returns sums over devices: of the metrics, and of the gradient or the optimizer's message.

    The message takes the place of the gradient if `stage` is not None, see `optim.reducing`.
    """
    loss, sums = backend.add((gradients.loss, gradients.sums))
    not_finite = backend.not_finite(gradients.grads)
    before = dict(state.parts)
    if RESIDUAL in before and getattr(stage, "resets", False):
        # This stage sends a quantity to which the residual does not belong. Reset the residual even
        # if the update is skipped, because the stage lasts a single update.
        before[RESIDUAL] = {**before[RESIDUAL], "kept": backend.reset(before[RESIDUAL]["kept"])}
    residual = before[RESIDUAL]["kept"] if RESIDUAL in before else ()
    params = backend.parts(state.params)
    message, apply_message = gradients.grads, None
    if stage is not None:
        assert isinstance(tx, Reducing)  # other optimizers have no stages
        message, apply_message = tx.message(
            _as(state.params, message),
            state.opt_state,
            params,
            stage=stage,
            num_devices=mesh_lib.num_batch_shards(backend.layout.mesh),
        )
    sent, residual = backend.reduce(message, residual)
    return Exchanged(sent, residual, loss, sums, not_finite, params, before, apply_message)


def apply(
    tx: optax.GradientTransformation,
    backend: Backend,
    parts: Sequence[StateComponent],
    state: TrainState,
    gradients: Gradients,
    exchanged: Exchanged,
    statistics: MicrobatchStatistics | None = None,
    skip_nonfinite: bool = False,
) -> tuple[TrainState, Sums]:
    """Returns the state after an optimizer step with the exchanged sums, and the metrics."""
    old, before, model_state = exchanged.params, exchanged.parts, gradients.model_state
    updates, opt_state, measured = _stepped(tx, state, gradients, exchanged, statistics)
    # `stochastic_rounding` returns updates that are wider than the parameters.
    with jax.numpy_dtype_promotion("standard"):
        params = optax.apply_updates(old, updates)
    # Each metric is a pair (sum, weight). Loss and norms already cover the full batch.
    norm, one = backend.norm(_as(state.params, exchanged.sent)), jnp.ones((), jnp.float32)
    if exchanged.not_finite is not None:
        norm = jnp.where(exchanged.not_finite, jnp.nan, norm)
    metrics = {
        **exchanged.sums,
        "loss": (exchanged.loss, one),
        "grad_norm": (norm, one),
        "param_norm": (backend.norm(params), one),
        **measured,
    }
    # One NaN or infinite element makes the norm NaN or infinite on every device.
    finite = jnp.isfinite(norm) if skip_nonfinite else None
    moved = Update(state.step, params, model_state, finite, gradients.rows, exchanged.residual)
    after = {part.name: part.updated(before[part.name], moved) for part in parts}
    if finite is not None:
        stays = {part.name: part.skipped(before[part.name], after[part.name]) for part in parts}
        params, model_state, after = _where(
            finite, (params, model_state, after), (old, state.model_state, stays)
        )
        # `tree.map` sorts the names; restore the order of `parts`, which a state has.
        after = {part.name: after[part.name] for part in parts}
        opt_state = _where(finite, opt_state, state.opt_state, counts=False)
        # A pair (0, 0) changes no mean over several updates.
        metrics = _where(finite, metrics, jax.tree.map(jnp.zeros_like, metrics))
        metrics["skipped"] = (1 - finite.astype(jnp.float32), one)
    # Gather parameters last: under ZeRO-1 the skip and the averages work on shards.
    params = backend.from_microbatches(params)
    return TrainState(state.step + 1, params, model_state, opt_state, state.key, after), metrics


def _stepped(
    tx: optax.GradientTransformation,
    state: TrainState,
    gradients: Gradients,
    exchanged: Exchanged,
    statistics: MicrobatchStatistics | None,
) -> tuple[Any, Any, Sums]:
    """Returns the optimizer's updates, its new state, and the metrics of gradient statistics."""
    measured = gradients.measured
    if exchanged.apply is not None:
        return *exchanged.apply(exchanged.sent), measured
    given: Mapping[str, Any] = {}
    if statistics is not None:
        found, given = statistics.measured(gradients.shares, gradients.grads, exchanged.sent, state)
        measured = {**measured, **found}
    if isinstance(tx, Reducing):  # this program is for the plain stage
        given = {**given, "stage": None}
    # Accumulation and exchange may have widened the gradients. Cast them back: moments of Optax's
    # optimizers take the gradient's dtype, but the dtypes of a state must not change.
    grads = _as(state.params, exchanged.sent)
    update = optax.with_extra_args_support(tx).update
    return *update(grads, state.opt_state, exchanged.params, **given), measured


def make_update(
    task: Task,
    tx: optax.GradientTransformation,
    backend: Backend,
    *,
    accumulation_steps: int = 1,
    parts: Sequence[StateComponent] = PARTS,
    skip_nonfinite: bool = False,
    stage: Hashable = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Sums]]:
    """Returns one update as a function `(state, batch) -> (state, sums)`.

    The batch has the rows that a program sees: all rows under jit, one device's rows inside
    shard_map.

    The terms of the loss are sums. Each term is divided by its weight over all microbatches and
    devices, so the update does not depend on the number of microbatches or devices. `sums` has the
    metrics as pairs (sum, weight): those of the task, and three with weight 1: `loss`, `grad_norm`
    (l2 norm over all parameters, before clipping) and `param_norm` (l2 norm after the update).

    Args:
      task: the learning problem. Inside shard_map, its model's BatchNorm must name the batch axes,
        and no other layer may have batch statistics, see `statistics.check_statistics`.
      tx: the optimizer; inside shard_map, with `axis_name=layout.update_spec`.
      backend: defines how sums, scatters and gathers are done, see `backends`.
      accumulation_steps: number of microbatches into which each device's rows are cut. The rows of
        a batch are in the order of `rows.microbatch_order`.
      parts: further components of the state.
      skip_nonfinite: whether to skip an update if its gradient is not finite. Parameters, model state
        and the optimizer's floating-point state then do not change; for components see
        `StateComponent.skipped`. The optimizer's counts and the state's step advance, so that they
        agree. The metrics of a skipped update are pairs (0, 0), except for the additional metric
        `skipped`.
      stage: stage of an optimizer that sends a message in place of the gradient, see
        `optim.reducing`. `grad_norm` is then the norm of the message's sum.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        gradients = accumulate(task, backend, parts, state, batch, accumulation_steps)
        exchanged = exchange(tx, backend, state, gradients, stage)
        return apply(tx, backend, parts, state, gradients, exchanged, skip_nonfinite=skip_nonfinite)

    return train_step


def row_major(grads: PyTree, mesh: Mesh) -> Any:
    """Fixes the memory layout of gradients that have an axis of length 1, on a CPU.

    The position of such an axis in the layout does not change the memory, and XLA chooses another
    position in a loop. XLA then multiplies and adds in another order within fused operations, so
    that several updates in one call would differ from one update per call in the last bit.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return grads

    def fixed(leaf: jax.Array) -> jax.Array:
        if 1 not in leaf.shape:
            return leaf
        in_order = layout_lib.Layout(tuple(range(leaf.ndim)))
        return layout_lib.with_layout_constraint(leaf, in_order)

    return jax.tree.map(fixed, grads)


def _as(like: Any, tree: PyTree) -> Any:
    """Returns `tree` with the dtypes of `like`."""
    return jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), tree, like)


def _where(finite: jax.Array, new: Any, before: Any, counts: bool = True) -> Any:
    """Returns `new` if `finite`, else `before`; if not `counts`, integers are always from `new`."""

    def chosen(new: jax.Array, before: jax.Array) -> jax.Array:
        changes = counts or jnp.issubdtype(new.dtype, jnp.inexact)
        return jnp.where(finite, new, before) if changes else new

    return jax.tree.map(chosen, new, before)
