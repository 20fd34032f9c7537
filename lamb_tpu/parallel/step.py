"""The training step, written once for jit, shard_map and pmap, and the steps of an evaluation."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.optim.reducing import Reducing, stage_of
from lamb_tpu.parallel import accumulation, backends, curvature
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.compiling import compiler_options
from lamb_tpu.parallel.exchange import Exchange, Placed, make_exchange
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.mesh import batch_axes, batch_sharding, replicated
from lamb_tpu.parallel.parts import RESIDUAL, StatePart, Update
from lamb_tpu.parallel.state import PARTS, TrainState
from lamb_tpu.tasks import HostScored, Sums, Task

Batch = Mapping[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Sums]]
Measure = Callable[[Any], tuple[Sums, Mapping[str, Any]]]


def make_update(
    task: Task,
    tx: optax.GradientTransformation,
    backend: backends.JitBackend | backends.ShardMapBackend,
    *,
    accumulation_steps: int = 1,
    parts: Sequence[StatePart] = PARTS,
    skip_nonfinite: bool = False,
    stage: Hashable = None,
) -> Step:
    """Returns one update as a function `(state, batch) -> (state, sums)`.

    The batch is the rows that a program sees: all under jit, one device's inside shard_map.

    The terms of the loss are sums. Each is divided by its weight over all microbatches and devices.
    That weight is known from the batch before the backward pass, so the update does not depend on
    the number of microbatches or devices. The metrics are pairs (sum, weight): the task's, and with
    weight 1 `loss`, `grad_norm` (l2, over all parameters, before any clipping) and `param_norm`
    (l2, after the update).

    Args:
      task: the learning problem. Inside shard_map its model's BatchNorm names the batch axes, and
        no layer keeps statistics of its own, see `statistics.check_statistics`.
      tx: the optimizer. Inside shard_map with `axis_name=layout.update_spec`.
      backend: sums, scatters and gathers, by the compiler or explicit.
      accumulation_steps: number of microbatches that each device's rows are cut into. The rows of a
        batch are in the order of `mesh.microbatch_order`.
      parts: further parts of the state.
      skip_nonfinite: skip an update whose gradient is not finite. Parameters, model state and the
        optimizer's floating-point state stay, and so do parts, see `StatePart.skipped`. The
        optimizer's counts and the step advance, so that all clocks agree. The metrics of a skipped
        update are pairs of 0. Adds the metric `skipped`.
      stage: of an optimizer that sums over devices by itself, see `optim.reducing`. `grad_norm` is
        then that of the sums which it asks for.
    """

    finish = make_finish(tx, backend, parts, skip_nonfinite, stage)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        rows = len(next(iter(batch.values())))
        fields = {part.name: part.field(state.parts[part.name]) for part in parts}
        carried = {name: field for name, field in fields.items() if field is not None}
        # The gradient of these rows' share of the loss. The key is a function of the number of the
        # update, so a resumed run draws what the uninterrupted one does.
        grads, loss, model_state, sums = accumulation.gradients(
            task,
            backend.whole_params(state.params),
            state.model_state,
            {**batch, **carried},
            # Weights of the whole batch: the loss is divided by them once, before it is summed.
            backend.add(task.weights(batch)),
            jax.random.fold_in(state.key, state.step),
            backend.positions(rows, accumulation_steps),
            accumulation_steps,
            backend.num_shards,
            backend.batch_sharding,
            carried,
        )
        new_rows = {name: model_state[name] for name in carried}
        if carried:
            model_state = {k: v for k, v in model_state.items() if k not in carried}
        return finish(state, grads, loss, model_state, sums, new_rows)

    return train_step


def make_finish(
    tx: optax.GradientTransformation,
    backend: backends.JitBackend | backends.ShardMapBackend,
    parts: Sequence[StatePart] = PARTS,
    skip_nonfinite: bool = False,
    stage: Hashable = None,
) -> Callable[..., tuple[TrainState, Sums]]:
    """Returns the second half of an update: sums over devices, the optimizer, metrics, parts.

    It is a function `(state, grads, loss, model_state, sums, rows, measure) -> (state, sums)` of
    the gradient and the shares that `accumulation.gradients` returns, and the new value of each
    carried field. From the gradient placed as the optimizer's state `measure` returns further
    metrics, and further arguments of `tx.update`.

    Args:
      tx, backend, parts, skip_nonfinite, stage: see `make_update`.
    """
    update = optax.with_extra_args_support(tx).update
    num_devices = mesh_lib.num_batch_shards(backend.layout.mesh)

    def finish(
        state: TrainState,
        grads: Any,
        loss: jax.Array,
        model_state: Any,
        task_sums: Sums,
        new_rows: Mapping[str, jax.Array],
        measure: Measure = lambda grads: ({}, {}),
    ) -> tuple[TrainState, Sums]:
        # The model state needs no sum: BatchNorm takes its statistics over devices by itself.
        loss, task_sums = backend.add((loss, task_sums))
        not_finite = backend.not_finite(grads)
        before = dict(state.parts)
        part = before.get(RESIDUAL)
        if part is not None and getattr(stage, "resets", False):
            # The residual is of another quantity than what this stage sends. This holds even if the
            # update is skipped, because the stage does not come back.
            part = before[RESIDUAL] = {**part, "kept": backend.reset(part["kept"])}
        reduced: list[tuple[Any, Any]] = []  # the sums over all examples, and the new residual

        def reduce(tree: Any) -> Any:
            sums, residual = backend.reduce(tree, () if part is None else part["kept"])
            reduced.append((sums, residual))
            return sums

        # The update, on this device's part of the state.
        old = backend.parts(state.params)
        measured: Sums = {}
        given: Mapping[str, Any] = {"reduce": reduce, "stage": stage, "num_devices": num_devices}
        if stage is None:
            grads = reduce(grads)
            measured, given = measure(grads)
            if isinstance(tx, Reducing):  # which needs no other stage in this program
                given = {**given, "stage": None}
        # Accumulation and exchange may have widened them. Moments of Optax's optimizers take the
        # gradient's dtype, and a state must keep its own.
        grads = _as(state.params, grads)
        updates, opt_state = update(grads, state.opt_state, old, **given)
        if len(reduced) != 1:
            raise ValueError(f"the optimizer has called `reduce` {len(reduced)} times and not once")
        sums, residual = reduced[0]
        # Updates of `stochastic_rounding` are wider than the parameters on purpose.
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(old, updates)
        # The metrics, each a pair (sum, weight). Loss and norms are already those of the whole
        # batch.
        norm, one = backend.norm(_as(state.params, sums)), jnp.ones((), jnp.float32)
        if not_finite is not None:
            norm = jnp.where(not_finite, jnp.nan, norm)
        metrics = {
            **task_sums,
            "loss": (loss, one),
            "grad_norm": (norm, one),
            "param_norm": (backend.norm(params), one),
            **measured,
        }
        # One element that is NaN or infinite makes the norm so, on every device.
        finite = jnp.isfinite(norm) if skip_nonfinite else None
        moved = Update(state.step, params, model_state, finite, new_rows, residual)
        after = {part.name: part.updated(before[part.name], moved) for part in parts}
        if finite is not None:
            stays = {part.name: part.skipped(before[part.name], after[part.name]) for part in parts}
            params, model_state, after = _where(
                finite, (params, model_state, after), (old, state.model_state, stays)
            )
            opt_state = jax.tree.map(
                lambda new, old: (
                    jnp.where(finite, new, old) if jnp.issubdtype(new.dtype, jnp.inexact) else new
                ),
                opt_state,
                state.opt_state,
            )
            # `tree.map` sorts the names, and a state has them in the order of `parts`.
            after = {part.name: after[part.name] for part in parts}
            # A pair (0, 0) changes no mean over several updates.
            metrics = jax.tree.map(lambda x: jnp.where(finite, x, jnp.zeros_like(x)), metrics)
            metrics["skipped"] = (1 - finite.astype(jnp.float32), one)
        # After the skip and the averages, which work on parts: under ZeRO-1 whole parameters are
        # gathered once.
        params = backend.from_parts(params)
        new = TrainState(state.step + 1, params, model_state, opt_state, state.key, after)
        return new, metrics

    return finish


def make_backend(
    name: str, layout: Layout, exchange: Placed | None = None
) -> backends.JitBackend | backends.ShardMapBackend:
    """Returns the backend of a name, see `make_train_step`."""
    if name == "jit":
        return backends.JitBackend(layout)
    return backends.ShardMapBackend(layout, exchange or make_exchange(layout))


class Stage(NamedTuple):
    """What a program is compiled for; the updates of a stage have equal ones.

    Attributes:
      exchange: sums the gradients; None under jit.
      of_optimizer: of an optimizer that sums over devices by itself, see `optim.reducing`.
    """

    exchange: Exchange | None = None
    of_optimizer: Hashable = None


PLAIN = Stage()


def stage_at(tx: optax.GradientTransformation, exchange: Placed | None, update: int) -> Stage:
    """Returns the stage of the update after `update` completed ones."""
    of_optimizer = stage_of(tx, update)
    if exchange is None:
        return Stage(None, of_optimizer)
    if isinstance(tx, Reducing) and of_optimizer is None:
        return Stage(exchange.plain().exchange)
    return Stage(exchange.exchange.at(update), of_optimizer)


def of_stage(exchange: Placed | None, stage: Stage) -> Placed | None:
    """Returns an exchange as it is in a stage."""
    if exchange is None or stage.exchange is None:
        return exchange
    return dataclasses.replace(exchange, exchange=stage.exchange)


def _as(like: Any, tree: Any) -> Any:
    """Returns a tree with the dtypes of another."""
    return jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), tree, like)


def _where(finite: jax.Array, new: Any, before: Any) -> Any:
    """Returns `new` where finite, otherwise `before`."""
    return jax.tree.map(lambda new, before: jnp.where(finite, new, before), new, before)


def make_train_step(
    task: Task,
    tx: optax.GradientTransformation,
    layout: Layout,
    shardings: TrainState,
    backend: str = "jit",
    exchange: Placed | None = None,
    stage: Stage = PLAIN,
    **options: Any,
) -> jax.stages.Wrapped:
    """One update over all devices, compiled at its first call; the state's buffers are donated.

    Args:
      task: the learning problem; see `make_update`.
      tx: the optimizer; see `make_update`.
      layout: where parameters and moments live.
      shardings: shardings of the state, see `state.state_shardings`.
      backend: 'jit' (the compiler places the collectives) or 'shard_map' (the program names them).
      exchange: under shard_map, what gradients are sent as; None: as they are.
      stage: see `stage_at`.
      **options: further arguments of `make_update`.
    """
    mesh = layout.mesh
    batch, whole = batch_sharding(mesh), replicated(mesh)
    placed = of_stage(exchange, stage)
    update = make_update(
        task, tx, make_backend(backend, layout, placed), stage=stage.of_optimizer, **options
    )
    if backend == "jit":
        update = in_mesh(mesh, update)
    else:
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        # check_vma would sum the gradients of replicated parameters by itself, with one all-reduce
        # for each leaf and in its own dtype, and BatchNorm could not split an axis into groups.
        update = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(batch_axes(mesh))),
            out_specs=(specs, PartitionSpec()),
            check_vma=False,
        )
    # Without shardings of the output the compiler might place the new state otherwise than the old,
    # and compile again for it.
    return jax.jit(
        update,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, whole),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def make_eval_step(task: Task, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns `(params, model_state, batch) -> {metric: (sum, weight)}` over unmasked rows.

    Parameters may be split in any way.
    """
    return _jit(task.evaluate, mesh)


def make_predict_step(task: HostScored, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns `(params, model_state, batch) -> outputs` of all rows, whole on every device."""
    return _jit(task.predict, mesh)


def make_lipschitz_step(task: Task, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns `(state, batch) -> estimate`, whole on every device, see `curvature.lipschitz`."""
    return _jit(functools.partial(curvature.lipschitz, task), mesh)


def _jit(function: Callable[..., Any], mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(
        in_mesh(mesh, function),
        out_shardings=replicated(mesh),
        compiler_options=compiler_options(mesh),
    )


def in_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that layers which split activations see the mesh while it is traced."""

    @functools.wraps(function)  # for the name of the compiled program
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced
