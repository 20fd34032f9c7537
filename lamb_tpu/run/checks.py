"""Checks of a config against the mesh, the task and the model that it names."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import data, models, own, tasks
from lamb_tpu.batching.rules import Rule
from lamb_tpu.errors import UserError
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import statistics
from lamb_tpu.run import batches
from lamb_tpu.run.recipe import naming, optimizer_of


def check_batch(config: ConfigDict, mesh: Mesh) -> tuple[int, str]:
    """Refuses a batch size that does not divide over the devices, microbatches and groups.

    Returns:
      The number of devices over which a group of BatchNorm is spread, and a line about the groups.
    """
    parts, steps = mesh_lib.num_batch_shards(mesh), config.accumulation_steps
    over = f"the {parts} devices of config.mesh"
    # These axes do not split the batch, so there are more devices than parts.
    if "model" in mesh.shape or "sequence" in mesh.shape:
        over = f"the {parts} parts into which config.mesh splits it"
    mesh_lib.check_divides("config.batch_size", config.batch_size, parts, over)
    if steps > 1:
        over += f" in config.accumulation_steps={steps} microbatches"
        mesh_lib.check_divides("config.batch_size", config.batch_size, parts * steps, over)
    # BatchNorm sees one microbatch at a time.
    with naming("config.model"):
        return models.batch_norm_groups(config.model, config.batch_size // steps, parts)


def batch_unit(config: ConfigDict, mesh: Mesh, task: tasks.Task) -> int:
    """Returns the number of which a batch must be a multiple, whatever BatchNorm's groups.

    It is a microbatch of one example a device, or of one pair for a task that mixes pairs.
    """
    pair = 2 if getattr(task, "mixed_by", ()) else 1
    return pair * mesh_lib.num_batch_shards(mesh) * config.accumulation_steps


def check_pairs(config: ConfigDict, mesh: Mesh, task: tasks.Task) -> None:
    """Refuses a batch size that would split the pairs of examples that a task mixes."""
    # Only tasks that mix examples have the attribute.
    names = getattr(task, "mixed_by", ())
    if names:
        # Both examples of a pair must be on one device and in one microbatch.
        parts, steps = mesh_lib.num_batch_shards(mesh), config.accumulation_steps
        mesh_lib.check_divides(
            "config.batch_size",
            config.batch_size,
            batch_unit(config, mesh, task),
            f"the {parts} devices of config.mesh in config.accumulation_steps={steps} microbatches "
            f"of whole pairs, which config.task.{names[0]} mixes",
        )


def check_statistics(
    config: ConfigDict,
    abstract: state_lib.TrainState,
    train_set: data.Source,
    in_microbatches: bool = False,
) -> None:
    """Refuses a model with statistics of its own if it would see only a part of the batch.

    Args:
      config: of the run.
      abstract: shapes and dtypes of its state.
      train_set: its data.
      in_microbatches: whether its step is made of microbatches, however many a batch has.
    """
    rows = config.batch_size // config.accumulation_steps
    batch = {
        name: jax.ShapeDtypeStruct((rows, *spec.shape), spec.dtype)
        for name, spec in train_set.element_spec.items()
    }
    # A new model, because the run's may name mesh axes that exist only inside shard_map.
    task = tasks.build(model=models.build(**config.model), **config.task)
    with naming("config.model"):
        statistics.check_statistics(
            task,
            abstract.params,
            abstract.model_state,
            batch,
            abstract.key,
            whole=config.accumulation_steps == 1 and not in_microbatches,
        )


def check_changing(config: ConfigDict, task: tasks.Task, mesh: Mesh, rule: Rule) -> None:
    """Refuses a batch that changes where something has one size, or there is nothing to measure."""
    named = f"config.batch_rule.name is {config.batch_rule.name!r}"
    if task.model.carry_shape is not None:
        raise UserError(
            f"{named}, and the network {config.model.name!r} carries a state for each row of the "
            "batch, so its batch must stay one size; leave config.batch_rule empty"
        )
    if config.log.mlperf:
        raise UserError(
            f"{named}, and MLPerf's log has one batch size; it needs config.log.mlperf=False"
        )
    has_axes, devices = config.parallel.backend == "shard_map", mesh_lib.num_batch_shards(mesh)
    what = batches.compares_parts(config, rule)
    if has_axes and devices == 1 and what:
        raise UserError(
            f"{what} compares the devices under config.parallel.backend='shard_map', and there is "
            "one; take 'jit', which compares microbatches"
        )


def check_changing_data(train_set: data.Source) -> None:
    """Refuses data whose order or rows depend on the batch size, for a batch that changes."""
    if train_set.buckets is not None or train_set.streams is not None:
        what = "batches of like lengths" if train_set.streams is None else "streams of text"
        raise UserError(
            f"config.batch_rule changes the batch, and {data.title(train_set)} is read in {what}, "
            "which needs one batch size; leave config.batch_rule empty"
        )


def check_stacked(stacked: str | None, facts: Any) -> None:
    """Refuses rules that treat the stacked layers of a parameter as one layer.

    Args:
      stacked: regex over the paths of the model's stacked parameters; None for a model without.
      facts: the facts of the parameters.
    """
    if stacked is None:
        return
    for path, fact in zip(parameters.leaf_paths(facts), jax.tree.leaves(facts), strict=True):
        if parameters.matches(stacked, path) and fact.adapt and 0 not in fact.layer_axes:
            raise UserError(
                f"config.model stacks its layers along axis 0 of {path!r}, and "
                "config.optimizer.rules give it no layer_axes, so all layers would share one trust "
                "ratio; give rules with layer_axes=(0,) for them, as "
                "lamb_tpu.models.bert_rules.PARAMETERS_SCANNED (configs/bert_pretrain.py has them "
                "by its argument scan), or set config.model.scan_layers=False"
            )


def check_split(config: ConfigDict, params: Any, axis_name: Callable[[str], Any]) -> None:
    """Refuses a user's own optimizer that would take part of a tensor for the whole of it.

    Args:
      config: of the run.
      params: the parameters, or their shapes.
      axis_name: inside shard_map the mesh axes over which the update of a path's leaf is split.

    Raises:
      UserError: it has no argument axis_name, and a leaf is split.
    """
    name = config.optimizer.name
    split = [path for path in parameters.leaf_paths(params) if axis_name(path)]
    if not own.is_own(name) or not split:
        return
    # Any optimizer that takes the axis is trusted to sum over it.
    taken = {parameter.name for parameter in own.parameters(optimizer_of(name))}
    if "axis_name" not in taken:
        raise UserError(
            f"config.optimizer.name is {name!r}, which has no argument 'axis_name', and inside "
            f"shard_map it sees parts of tensors, as of {split[0]!r}: norms and means have to be "
            "summed over that axis; add the argument, or take config.parallel.backend='jit'"
        )
