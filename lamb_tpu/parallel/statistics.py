"""Refuses networks whose running statistics would be those of a part of the batch."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import Var

from lamb_tpu.models.norm import MOMENTS
from lamb_tpu.optim import parameters
from lamb_tpu.tasks import Task


def check_statistics(
    task: Task, params: Any, model_state: Any, batch: Mapping[str, Any], key: Any, whole: bool
) -> None:
    """Refuses a model that keeps statistics of the batch other than by `models.norm.BatchNorm`.

    A layer such as `nn.BatchNorm` of Flax normalises by the examples that it sees, which are a
    device's part inside shard_map and a microbatch under accumulation: another network, and running
    averages of one part. Nothing is computed: the loss is traced.

    Args:
      task: the learning problem.
      params: the parameters, or their shapes and dtypes, as all that follows.
      model_state: the model's other collections.
      batch: rows that one forward pass sees.
      key: random key.
      whole: the batch is not cut into microbatches, so that state which does not depend on the
        batch is the same on every device and may stay; else nobody would combine it.

    Raises:
      ValueError: naming the layers.
    """
    paths = parameters.leaf_paths(model_state)
    if not paths:
        return

    def new_state(model_state: Any, batch: Any, params: Any, key: Any) -> Any:
        _, (state, _) = task.loss(params, {**model_state, MOMENTS: {}}, batch, key)
        return state

    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (model_state, dict(batch), params, key),
    )
    traced, shapes = jax.make_jaxpr(new_state, return_shape=True)(*given)
    rows = traced.jaxpr.invars[len(paths):][:len(given[1])]
    depends = _depending(traced.jaxpr, rows) if whole else [True] * len(traced.jaxpr.outvars)
    known = {f"batch_stats/{path}" for path in parameters.leaf_paths(shapes.get(MOMENTS, {}))}
    layers = [
        path.rpartition("/")[0].partition("/")[2] or path
        for path, on_batch in zip(parameters.leaf_paths(shapes), depends, strict=True)
        if on_batch and path not in known and not path.startswith(f"{MOMENTS}/")
    ]
    if layers:
        listed = ", ".join(map(repr, list(dict.fromkeys(layers))[:4]))
        raise ValueError(
            f"the model's layer {listed} keeps statistics of its own, which under "
            "config.parallel.backend='shard_map' and config.accumulation_steps above 1 would be "
            "those of a part of the batch; make it lamb_tpu.models.norm.BatchNorm, or take 'jit' "
            "and 1"
        )


def _depending(jaxpr: Any, sources: list[Var]) -> list[bool]:
    """Of each output whether it may depend on one of some inputs.

    What an operation gives out is taken to depend on all that it takes in.
    """
    found = set(sources)

    def any_found(variables: list[Any]) -> bool:
        return any(isinstance(variable, Var) and variable in found for variable in variables)

    for equation in jaxpr.eqns:
        if any_found(equation.invars):
            found.update(equation.outvars)
    return [any_found([variable]) for variable in jaxpr.outvars]
