"""A check that refuses networks whose running statistics would see only a part of the batch."""

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

    A layer such as Flax's `nn.BatchNorm` normalises by the examples that it sees: a device's part
    inside shard_map, a microbatch under accumulation. That would be another network, with running
    averages of one part. The loss is only traced; nothing is computed.

    Args:
      task: the learning problem.
      params: the parameters, or their shapes and dtypes.
      model_state: the model's other collections, or their shapes and dtypes.
      batch: the rows that one forward pass sees, or their shapes and dtypes.
      key: random key, or its shape and dtype.
      whole: whether the batch is not cut into microbatches. State that does not depend on the batch
        is then the same on every device and may stay. With microbatches no code would combine it.

    Raises:
      ValueError: the model has such layers; the message names them.
    """
    paths = parameters.leaf_paths(model_state)
    if not paths:
        return

    def new_state(model_state: Any, batch: Any, params: Any, key: Any) -> Any:
        # `models.norm.BatchNorm` writes its moments where it is given this collection, so its
        # layers can be told from others.
        _, (state, _) = task.loss(params, {**model_state, MOMENTS: {}}, batch, key)
        return state

    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (model_state, dict(batch), params, key),
    )
    traced, shapes = jax.make_jaxpr(new_state, return_shape=True)(*given)
    # The inputs of a jaxpr are the leaves of the arguments in order: model state, then the batch,
    # which is a flat dict.
    rows = traced.jaxpr.invars[len(paths) :][: len(given[1])]
    depends = _depending(traced.jaxpr, rows) if whole else [True] * len(traced.jaxpr.outvars)
    # Moments have the paths of the running averages, below another collection.
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
    """Returns for each output whether it may depend on one of `sources`.

    Every output of an operation counts as depending on all of the operation's inputs.
    """
    found = set(sources)

    def any_found(variables: list[Any]) -> bool:
        return any(isinstance(variable, Var) and variable in found for variable in variables)

    for equation in jaxpr.eqns:
        if any_found(equation.invars):
            found.update(equation.outvars)
    return [any_found([variable]) for variable in jaxpr.outvars]
