"""Exact gradients of a case's loss, which for classification is written from its formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.models.dropout import example_positions
from lamb_tpu.run.build import Run
from tests.fuzz import exact


class Gradients:
    """The loss of some rows of a batch and its gradient: `(state, update, batch, first)`.

    `first` is the position of the first row in the batch, which dropout depends on.
    """

    def __init__(self, run: Run, key: jax.Array) -> None:
        self._run, self._key = run, key
        self._smoothing = getattr(run.task, "label_smoothing", 0.0)
        self._traced: dict[int, tuple[Any, Any]] = {}

    def __call__(
        self, params: Any, model_state: Any, update: int, batch: Any, first: int = 0
    ) -> tuple[float, Any, Any]:
        """Returns the loss, the new model state and the gradient, in float64."""
        rows = len(next(iter(batch.values())))
        arguments = (params, model_state, batch, np.int32(update), np.int32(first))
        if rows not in self._traced:
            like = jax.tree.map(_narrow, (params, model_state))
            traced = jax.jit(self._gradients).trace(*like, *arguments[2:])
            self._traced[rows] = traced.jaxpr, jax.tree.structure(traced.out_info)
        closed, out = self._traced[rows]
        (loss, state), grads = out.unflatten(
            exact.evaluate(closed, 0.0, jax.tree.leaves(arguments))
        )
        return float(loss), state, grads

    def _gradients(
        self, params: Any, model_state: Any, batch: Any, update: jax.Array, first: jax.Array
    ) -> Any:
        rows = len(next(iter(batch.values())))
        mixes = bool(getattr(self._run.task, "mixed_by", ()))
        is_formula = "image" in batch and not mixes
        loss = self._classification_loss if is_formula else self._task_loss
        key = jax.random.fold_in(self._key, update)
        with example_positions(first + jnp.arange(rows, dtype=jnp.int32)):
            return jax.value_and_grad(loss, has_aux=True)(params, model_state, batch, key)

    def _classification_loss(
        self, params: Any, model_state: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The mean over examples of -sum of target * log probability."""
        task = self._run.task
        images = (batch["image"].astype(jnp.float32) - task.input_mean) / task.input_std
        variables = {"params": params, **model_state}
        logits, state = task.model.apply(variables, images, train=True, key=key)
        classes = logits.shape[-1]
        shifted = logits - jnp.max(logits, -1, keepdims=True)
        chances = jnp.exp(shifted) / jnp.sum(jnp.exp(shifted), -1, keepdims=True)
        is_label = batch["label"][:, None] == jnp.arange(classes)
        target = jnp.where(is_label, 1.0 - self._smoothing, 0.0) + self._smoothing / classes
        return jnp.mean(jnp.sum(-target * jnp.log(chances), -1)), state

    def _task_loss(
        self, params: Any, model_state: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        task = self._run.task
        terms, (state, _) = task.loss(params, model_state, batch, key)
        weights = task.weights(batch)
        return sum(terms[name] / weights[name] for name in terms), state


def _narrow(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a leaf in the dtype that the network has."""
    dtype = np.float32 if exact.is_float(leaf.dtype) else leaf.dtype
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)
