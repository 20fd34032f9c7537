"""Checks of a config against its mesh, task and model."""

import contextlib
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from lamb_tpu import data, models, tasks
from lamb_tpu.errors import UserError, naming
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel import statistics
from lamb_tpu.spec import Spec


def check_single(spec: Spec) -> None:
    """Rejects a config with seeds or phases, which stands for several runs."""
    if spec.seeds:
        raise UserError(
            "config.seeds",
            spec.seeds,
            "stands for several runs, each in a folder seed_N",
            "give one of these folders as --workdir; with --config, also give --config.seeds= and "
            "--config.seed=N",
        )
    if spec.phases:
        raise UserError(
            "config.phases",
            problem=f"has phases ({', '.join(sorted(spec.phases))}), each in the folder of that name",
            remedy="give one of these folders as --workdir; with --config, choose one phase, for "
            "example with the config's argument phase=N",
        )


def abstract_params(model_name: str, task: tasks.Task, example: Any) -> Any:
    """Returns shapes and dtypes of the parameters of a task's network for a batch of one example.

    Errors of custom code are raised unchanged, so that `custom.blame` can name the line.
    """
    shipped = model_name in models.MODULES and type(task) in tasks.TASKS.values()
    with naming("config.model") if shipped else contextlib.nullcontext():
        return jax.eval_shape(task.init, jax.random.key(0), example)["params"]


def check_batch(spec: Spec, mesh: Mesh | AbstractMesh) -> tuple[int, str]:
    """Rejects a batch size that cannot be split evenly over devices and microbatches.

    Also checks the groups of BatchNorm. Returns the number of devices that share a group, and a
    line for the terminal about the groups.
    """
    shards, steps = mesh_lib.num_batch_shards(mesh), spec.accumulation_steps
    over = f"the {shards} device{'s' if shards > 1 else ''} of config.mesh"
    # These axes do not split the batch, so there are more devices than shards of the batch.
    if "model" in mesh.shape or "sequence" in mesh.shape:
        over = f"the {shards} batch shards of config.mesh"
    mesh_lib.check_divides("config.batch_size", spec.batch_size, shards, over)
    if steps > 1:
        over += f" times config.accumulation_steps={steps}"
        mesh_lib.check_divides("config.batch_size", spec.batch_size, shards * steps, over)
    # BatchNorm sees one microbatch at a time.
    with naming("config.model"):
        return models.batch_norm_groups(spec.model.as_dict(), spec.batch_size // steps, shards)


def batch_unit(spec: Spec, mesh: Mesh, task: tasks.Task) -> int:
    """Returns a number that must divide each batch size; BatchNorm groups may need a larger divisor."""
    pair = 2 if getattr(task, "mixed_by", ()) else 1
    return pair * mesh_lib.num_batch_shards(mesh) * spec.accumulation_steps


def check_pairs(spec: Spec, mesh: Mesh, task: tasks.Task) -> None:
    """Rejects a batch size that would split the pairs of examples that a task mixes."""
    # Only tasks that mix examples have the attribute.
    names = getattr(task, "mixed_by", ())
    if names:
        # Both examples of a pair must be on one device and in one microbatch.
        shards, steps = mesh_lib.num_batch_shards(mesh), spec.accumulation_steps
        mesh_lib.check_divides(
            "config.batch_size",
            spec.batch_size,
            batch_unit(spec, mesh, task),
            f"the {shards} devices of config.mesh times config.accumulation_steps={steps} times 2, "
            f"because config.task.{names[0]} mixes pairs of examples",
        )


def check_statistics(
    spec: Spec,
    task: tasks.Task,
    abstract: state_lib.TrainState,
    train_set: data.Source,
    in_microbatches: bool = False,
) -> None:
    """Rejects a model whose custom layers with batch statistics would see only part of the batch.

    `in_microbatches`: whether the step processes microbatches, even if a batch has only one.
    """
    rows = spec.batch_size // spec.accumulation_steps
    batch = {
        name: jax.ShapeDtypeStruct((rows, *spec.shape), spec.dtype)
        for name, spec in train_set.element_spec.items()
    }
    with naming("config.model"):
        statistics.check_statistics(
            task,
            abstract.params,
            abstract.model_state,
            batch,
            abstract.key,
            whole=spec.accumulation_steps == 1 and not in_microbatches,
        )
