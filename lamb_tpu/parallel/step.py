"""The training and evaluation steps under jit, and the state that they carry."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lamb_tpu.parallel.mesh import batch_sharding, replicated
from lamb_tpu.tasks import Sums, Task

Batch = Mapping[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """What one update turns into the next; all of it is in a checkpoint.

    Attributes:
      step: completed updates, int32 scalar; the one clock of a run.
      params: the model's parameters.
      model_state: its other collections, such as BatchNorm's running averages.
      opt_state: the optimizer's state.
      key: typed random key, constant; update t draws from `fold_in(key, t)`.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    key: jax.Array


def make_init(
    task: Task, tx: optax.GradientTransformation, batch: Mapping[str, Any]
) -> Callable[[jax.Array], TrainState]:
    """A function of a random key to the state before the first update.

    Args:
      task: the learning problem.
      tx: the optimizer.
      batch: arrays in whose shapes and dtypes batches come.
    """

    def init(key: jax.Array) -> TrainState:
        init_key, train_key = jax.random.split(key)
        zeros = {name: jnp.zeros(value.shape, value.dtype) for name, value in batch.items()}
        model_state = dict(task.init(init_key, zeros))
        params = model_state.pop("params")
        return TrainState(jnp.int32(0), params, model_state, tx.init(params), train_key)

    return init


def abstract_state(init: Callable[[jax.Array], TrainState], mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without computing it."""
    sharding = replicated(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init, jax.random.key(0)),
    )


def make_train_step(
    task: Task, tx: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Sums]]:
    """One update under jit: `(state, batch) -> (state, sums)`; the state's buffers are donated.

    The loss is a sum over the global batch; sum and weight are divided once, so the update does not
    depend on the number of devices. The metrics are pairs (sum, weight) too: the task's, `loss`,
    `grad_norm` (l2, over all parameters, before any clipping) and `param_norm` (l2, after the
    update), the last two of weight 1.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        key = jax.random.fold_in(state.key, state.step)

        def mean_loss(params: Any) -> tuple[jax.Array, Any]:
            loss, (model_state, sums) = task.loss(params, state.model_state, batch, key)
            total, weight = loss
            return total / weight, (model_state, {**sums, "loss": loss})

        grads, (model_state, sums) = jax.grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        one = jnp.ones((), jnp.float32)
        sums = {
            **sums,
            "grad_norm": (optax.tree.norm(grads), one),
            "param_norm": (optax.tree.norm(params), one),
        }
        return TrainState(state.step + 1, params, model_state, opt_state, state.key), sums

    whole, split = replicated(mesh), batch_sharding(mesh)
    return jax.jit(
        train_step, in_shardings=(whole, split), out_shardings=(whole, whole), donate_argnums=0
    )


def make_eval_step(task: Task, mesh: Mesh) -> Callable[[Any, Any, Batch], Sums]:
    """`(params, model_state, batch) -> {metric: (sum, weight)}` over the batch's unmasked rows."""
    whole, split = replicated(mesh), batch_sharding(mesh)
    return jax.jit(task.evaluate, in_shardings=(whole, whole, split), out_shardings=whole)
