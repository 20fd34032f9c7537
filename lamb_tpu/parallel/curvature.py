"""The local Lipschitz estimate of the LEGW paper: curvature along the gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu.optim import clipping
from lamb_tpu.parallel import accumulation
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Task
from lamb_tpu.types import Batch, Params


def lipschitz(task: Task, state: TrainState, batch: Batch) -> jax.Array:
    r"""Returns the local Lipschitz estimate of the gradient at a state, a float32 scalar.

    .. math:: L(x, g) = \frac{|g^T H g|}{\|g\|^2}

    for the gradient :math:`g` and the Hessian :math:`H` of the training loss over the rows of
    `batch`: the curvature along the gradient's direction. The estimate is 0 for a zero gradient. The
    second derivative is computed by applying reverse mode twice, because networks with custom
    derivatives, such as an LSTM, lack forward mode. The estimate takes the time and memory of a few
    gradients of these rows. Dropout masks are those of the next update.

    Args:
      task: the learning problem; its model names no mesh axes.
      state: the train state, with any sharding.
      batch: fields of shape (rows, ...).

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv:1901.08256. The definition was
      written down from memory and not compared with the paper.
    """
    weights = {term: jnp.asarray(weight) for term, weight in task.weights(batch).items()}
    key = jax.random.fold_in(state.key, state.step)
    positions = jnp.arange(len(next(iter(batch.values()))), dtype=jnp.int32)

    def gradient(params: Params) -> Any:
        grads, *_ = accumulation.gradients(
            task, params, state.model_state, batch, weights, key, positions
        )
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    grads = gradient(state.params)
    norm = clipping.global_norm(grads)
    # Normalize, so that the squares of a small gradient do not underflow.
    direction = jax.tree.map(lambda g: g / jnp.where(norm > 0, norm, 1), grads)

    def slope(distance: jax.Array) -> jax.Array:
        moved = jax.tree.map(
            lambda p, d: p + (distance * d).astype(p.dtype), state.params, direction
        )
        products = jax.tree.map(jnp.vdot, gradient(moved), direction)
        return sum(jax.tree.leaves(products), jnp.zeros(()))

    return jnp.abs(jax.grad(slope)(jnp.zeros(())))
