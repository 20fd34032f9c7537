"""The local Lipschitz estimate of the LEGW paper: curvature along the gradient."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu.optim import clipping
from lamb_tpu.parallel import accumulation
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Task


def lipschitz(task: Task, state: TrainState, batch: Mapping[str, jax.Array]) -> jax.Array:
    r"""Returns the local Lipschitz estimate of the gradient at a state, float32 ().

    .. math:: L(x, g) = \frac{|g^T H g|}{\|g\|^2}

    for the gradient :math:`g` and the Hessian :math:`H` of the training loss over the rows of
    `batch`: the curvature along the gradient's direction. For a gradient of zeros it is 0. It is
    the second derivative of the loss along that direction, in reverse mode twice: networks with
    derivatives of their own, such as an LSTM, have no forward mode. It takes the time and memory of
    a few gradients of these rows.

    Args:
      task: the learning problem; its model names no mesh axes.
      state: the state, in any placement.
      batch: fields of shape (rows, ...). Dropout draws what it would for these rows in the next
        update.

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv:1901.08256; the definition is
      recalled.
    """
    weights = {term: jnp.asarray(weight) for term, weight in task.weights(batch).items()}
    key = jax.random.fold_in(state.key, state.step)
    positions = jnp.arange(len(next(iter(batch.values()))), dtype=jnp.int32)

    def gradient(params: Any) -> Any:
        grads, *_ = accumulation.gradients(
            task, params, state.model_state, batch, weights, key, positions
        )
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    grads = gradient(state.params)
    norm = clipping.global_norm(grads)
    # Of length 1, so that no square of a small gradient underflows.
    direction = jax.tree.map(lambda g: g / jnp.where(norm > 0, norm, 1), grads)

    def slope(distance: jax.Array) -> jax.Array:
        moved = jax.tree.map(
            lambda p, d: p + (distance * d).astype(p.dtype), state.params, direction
        )
        products = jax.tree.map(jnp.vdot, gradient(moved), direction)
        return sum(jax.tree.leaves(products), jnp.zeros(()))

    return jnp.abs(jax.grad(slope)(jnp.zeros(())))
