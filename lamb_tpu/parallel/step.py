"""Compiled steps over all devices, for training (see `update`) and evaluation."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from lamb_tpu.optim.reducing import Reducing, stage_of
from lamb_tpu.parallel import backends, curvature
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.compiling import compiler_options
from lamb_tpu.parallel.exchange import Exchange, ShardedExchange, make_exchange
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.mesh import batch_sharding, replicated
from lamb_tpu.parallel.side_by_side import is_batched, side_by_side
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.parallel.update import Batch, make_update
from lamb_tpu.tasks import HostScored, Sums, Task
from lamb_tpu.types import PyTree

Step = Callable[[TrainState, Batch], tuple[TrainState, Sums]]
# `(arrays of the data set, draws) -> batch`, see `data.HeldSet`.
Read = Callable[[Batch, Batch], dict[str, jax.Array]]


def make_backend(
    name: str, layout: Layout, exchange: ShardedExchange | None = None
) -> backends.JitBackend | backends.ShardMapBackend:
    """Returns the backend 'jit' or 'shard_map', see `make_train_step`."""
    if name == "jit":
        return backends.JitBackend(layout)
    return backends.ShardMapBackend(layout, exchange or make_exchange(layout))


class Stage(NamedTuple):
    """A stage of a run; all updates of a stage share compiled programs."""

    exchange: Exchange | None = None  # sums the gradients; None under jit
    # Stage of an optimizer that sends a message in place of the gradient, see `optim.reducing`; None
    # for other optimizers.
    of_optimizer: Hashable = None


PLAIN = Stage()


def stage_at(
    tx: optax.GradientTransformation, exchange: ShardedExchange | None, update: int
) -> Stage:
    """Returns the stage of the update that follows `update` completed updates."""
    of_optimizer = stage_of(tx, update)
    if exchange is None:
        return Stage(None, of_optimizer)
    if isinstance(tx, Reducing) and of_optimizer is None:
        return Stage(exchange.plain().exchange)
    return Stage(exchange.exchange.at(update), of_optimizer)


def of_stage(exchange: ShardedExchange | None, stage: Stage) -> ShardedExchange | None:
    """Returns `exchange` with the inner exchange of a stage."""
    if exchange is None or stage.exchange is None:
        return exchange
    return dataclasses.replace(exchange, exchange=stage.exchange)


def make_train_step(
    task: Task,
    tx: optax.GradientTransformation,
    layout: Layout,
    shardings: TrainState,
    backend: str = "jit",
    exchange: ShardedExchange | None = None,
    stage: Stage = PLAIN,
    updates: int = 1,
    read: Read | None = None,
    runs: int = 1,
    global_update: Step | None = None,
    **options: Any,
) -> jax.stages.Wrapped:
    """Returns the step `(state, batch) -> (state, sums)` over all devices, compiled when first called.

    The buffers of the state are donated. With several `updates` in a call, the batches and the
    metrics have a leading axis of updates. With `read` the step is `(state, draws, arrays) ->
    (state, sums)`: the devices hold the arrays of the data set, and `draws` says which examples form
    the batch, and has their random numbers. With several `runs` the step takes and returns tuples of
    states, batches (or draws) and metrics, with one element per run.

    Args:
      task, tx: see `update.make_update`.
      layout: shardings of parameters and moments.
      shardings: shardings of the state, see `state.state_shardings`.
      backend: 'jit' (the compiler places the collectives) or 'shard_map' (the program calls them).
      exchange: under shard_map, sums the gradients; None: gradients are sent unchanged.
      stage: see `stage_at`.
      updates: number of updates in a call.
      read: returns a batch from arrays and draws, see `data.HeldSet`; None: the step gets batches.
      runs: number of runs, see `side_by_side`.
      global_update: an update of global arrays in place of `update.make_update`, see
        `microbatched.Microbatched.at_once`.
      **options: further arguments of `update.make_update`.
    """
    mesh = layout.mesh
    batch, whole = mesh_lib.stacked_sharding(mesh, updates), replicated(mesh)
    made_backend = make_backend(backend, layout, of_stage(exchange, stage))
    update: Callable[..., tuple[Any, Any]] = global_update or make_update(
        task, tx, made_backend, stage=stage.of_optimizer, **options
    )
    is_global = global_update is not None or backend == "jit"
    constrain = batch_sharding(mesh) if is_global else None
    if read is not None or updates > 1:
        update = _in_turn(update, updates, read, constrain)
    held = () if read is None else (whole,)
    given: tuple[Any, Any] = shardings, batch
    made: tuple[Any, Any] = shardings, whole
    if runs > 1:
        update = side_by_side(update, is_batched(mesh))
        given, made = ((shardings,) * runs, (batch,) * runs), ((shardings,) * runs, whole)
    if backend == "jit":
        update = in_mesh(mesh, update)
    elif not is_global:
        # With check_vma, JAX would sum the gradients of replicated parameters, by one all-reduce
        # for each leaf in the leaf's dtype, and BatchNorm could not split an axis into groups.
        update = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=_specs((*given, *held)),
            out_specs=_specs(made),
            check_vma=False,
        )
    # Without output shardings, the compiler might shard the new state differently from the old one,
    # and the next call would compile again.
    return jax.jit(
        update,
        in_shardings=(*given, *held),
        out_shardings=made,
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def _specs(shardings: PyTree) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def _in_turn(
    update: Step, updates: int, read: Read | None, constrain: NamedSharding | None
) -> Callable[..., tuple[TrainState, Sums]]:
    """Returns a function that makes one update after the other, with batches along a leading axis.

    If `updates` is 1, batches have no leading axis. Under jit, `constrain` is the sharding of a
    batch from `read`.
    """

    def train_steps(
        state: TrainState, batches: Batch, held: Batch | None = None
    ) -> tuple[TrainState, Sums]:
        def one(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
            if read is not None:
                assert held is not None  # arrays come with `read`
                batch = read(held, batch)
                if constrain is not None:
                    batch = jax.lax.with_sharding_constraint(batch, constrain)
                # Keep the compiler from fusing `read` with the update, so that the update compiles to
                # the same code as for a batch from the host.
                batch = jax.lax.optimization_barrier(batch)
            return update(state, batch)

        return one(state, batches) if updates == 1 else jax.lax.scan(one, state, batches)

    return train_steps


def make_eval_step(task: Task, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns `(params, model_state, batch) -> {metric: (sum, weight)}`, summed over unmasked rows.

    Parameters may have any sharding; the results are replicated.
    """
    return _jit(task.evaluate, mesh)


def make_predict_step(task: HostScored, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns `(params, model_state, batch) -> outputs`, replicated outputs for all rows."""
    return _jit(task.predict, mesh)


def make_lipschitz_step(task: Task, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns `(state, batch) -> estimate`, the replicated result of `curvature.lipschitz`."""
    return _jit(functools.partial(curvature.lipschitz, task), mesh)


def _jit(function: Callable[..., Any], mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(
        in_mesh(mesh, function),
        out_shardings=replicated(mesh),
        compiler_options=compiler_options(mesh),
    )


def in_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that, while it is traced, layers that split activations see the mesh."""

    @functools.wraps(function)  # for the name of the compiled program
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced
