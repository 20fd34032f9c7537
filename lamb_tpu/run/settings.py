"""The components of a run that need no data, and all checks of its config that need no data."""

from collections.abc import Sequence

import jax

from lamb_tpu import models, tasks
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.run import batches, checks, compatibility, exchanges, statistics
from lamb_tpu.run.categories import check_fields
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import resolve
from lamb_tpu.spec import Config, Spec, parse


def settings(
    config: Config, devices: Sequence[jax.Device] | None = None, training: bool = True
) -> Combination:
    """Builds the components of a run that need no data, after all checks that need no data."""
    spec = parse(config)
    check_fields(spec)
    checks.check_single(spec)
    mesh, batch_norm, group_replicas = mesh_lib.make_mesh(spec.mesh, devices), "", 1
    if training:
        group_replicas, batch_norm = checks.check_batch(spec, mesh)
        # Devices that share a group of BatchNorm must be neighbours.
        mesh = mesh_lib.make_mesh(spec.mesh, devices, group_replicas)
    task = plain_task = _task(spec)
    if spec.parallel.backend == "shard_map":  # BatchNorm needs the names of the mesh axes
        task = _task(spec, mesh_lib.batch_axes(mesh))
    if training:
        checks.check_pairs(spec, mesh, task)
    parts = Combination(
        spec=spec,
        training=training,
        mesh=mesh,
        task=task,
        plain_task=plain_task,
        batch_norm=batch_norm,
        optimizer=resolve_optimizer(spec.optimizer),
        exchange=exchanges.make(spec, mesh),
        rule=batches.check_rule(spec)[0],
        asked=statistics.statistics_of(spec),
        group_replicas=group_replicas,
    )
    compatibility.check(parts, "config")
    if training:
        statistics.check_rows(spec, mesh)
    # Durations depend on the number of examples, which may need a download. Find errors in the
    # durations and the optimizer before that, with an arbitrary number.
    parts.optimizer.make(resolve(spec, num_examples=10**6))
    for number, rule in enumerate(spec.parallel.rules):
        rules_lib.check_rule(number, rule)
    return parts


def _task(spec: Spec, axes: Sequence[str] = ()) -> tasks.Task:
    model = models.build(axis_name=axes, **spec.model.as_dict())
    return tasks.build(model=model, **spec.task.as_dict())
