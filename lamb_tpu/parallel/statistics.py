"""A check that rejects a network if its running statistics would cover only part of the batch."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import Var

from lamb_tpu.models.norm import MOMENTS
from lamb_tpu.optim import parameters
from lamb_tpu.tasks import Task
from lamb_tpu.types import Params, PyTree


def check_statistics(
    task: Task, params: Params, model_state: PyTree, batch: Mapping[str, Any], key: Any, whole: bool
) -> None:
    """Rejects a model that has batch statistics other than those of `models.norm.BatchNorm`.

    A layer such as Flax's `nn.BatchNorm` normalises with the statistics of the examples that it sees:
    a device's shard inside shard_map, a microbatch under accumulation. The outputs would differ from
    those for the full batch, and the running averages would cover only part of the batch. The loss
    is only traced; nothing is computed.

    Args:
      task: the learning problem.
      params, model_state, batch, key: arrays, or their shapes and dtypes. The batch has the rows
        that one forward pass sees.
      whole: True if the batch is not cut into microbatches. Then state that does not depend on the
        batch is allowed, because it is equal on all devices. With microbatches such state is
        rejected, because no code combines it over microbatches.

    Raises:
      ValueError: the model has such layers; the message names them.
    """
    paths = parameters.leaf_paths(model_state)
    if not paths:
        return

    def new_state(model_state: PyTree, batch: Any, params: Params, key: Any) -> Any:
        # If the model state has this collection, `models.norm.BatchNorm` writes its moments to the
        # collection. This identifies the layers of that class.
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
    # Moments have the paths of the running averages, in another collection.
    known = {f"batch_stats/{path}" for path in parameters.leaf_paths(shapes.get(MOMENTS, {}))}
    layers = [
        path.rpartition("/")[0].partition("/")[2] or path
        for path, on_batch in zip(parameters.leaf_paths(shapes), depends, strict=True)
        if on_batch and path not in known and not path.startswith(f"{MOMENTS}/")
    ]
    if layers:
        listed = ", ".join(map(repr, list(dict.fromkeys(layers))[:4]))
        raise ValueError(
            f"the model has running statistics in {listed}, which would cover only part of the "
            "batch with config.parallel.backend='shard_map' or with microbatches; use "
            "lamb_tpu.models.norm.BatchNorm instead, or config.parallel.backend='jit' without "
            "microbatches"
        )


def _depending(jaxpr: Any, sources: list[Var]) -> list[bool]:
    """Returns whether each output may depend on one of `sources`.

    Assumes that every output of an operation depends on all inputs of the operation.
    """
    dependent = set(sources)

    def any_dependent(variables: list[Any]) -> bool:
        return any(isinstance(variable, Var) and variable in dependent for variable in variables)

    for equation in jaxpr.eqns:
        if any_dependent(equation.invars):
            dependent.update(equation.outvars)
    return [any_dependent([variable]) for variable in jaxpr.outvars]
