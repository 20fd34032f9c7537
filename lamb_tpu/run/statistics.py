"""The statistics of gradients that a config asks for, and what they need of the rest of it."""

from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import data, tasks
from lamb_tpu.errors import UserError
from lamb_tpu.optim import modules, parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.gradient_statistics import Statistics, check_second_moments
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import batches
from lamb_tpu.run.recipe import naming

_SWITCHES = ("noise_scale", "preconditioned", "halves")
_NAMES = {
    "noise_scale": "the noise scale",
    "halves": "the gradients of two halves of the batch",
    "per_example": "gradients of single examples",
}


def settings_of(config: ConfigDict) -> ConfigDict:
    """Returns config.statistics with what config.batch_rule and config.optimizer.agvm need.

    Where the rule needs gradients of single examples, config.statistics.per_example is the number
    of them unless it is 0.
    """
    section, needed = ConfigDict(config.statistics), batches.required_statistics(config)
    if section.per_example:
        needed.pop("per_example", None)
    section.update(needed)
    return section


def statistics_of(config: ConfigDict) -> Statistics:
    """Returns the statistics that config.statistics asks for.

    Raises:
      UserError: a value is out of range; config.statistics.modules are no pairs of text.
    """
    section = settings_of(config)
    for key, lowest in (("per_example", 0), ("interval", 1)):
        if section[key] < lowest:
            raise UserError(
                f"config.statistics.{key} is {section[key]}; it must be at least {lowest}"
            )
    if not 0 <= section.decay < 1:
        raise UserError(
            f"config.statistics.decay is {section.decay}; it must be at least 0 and below 1"
        )
    pairs = tuple(section.modules)
    with naming("config.statistics"):
        modules.check_pairs("config.statistics.modules", pairs)
    if pairs and not section.halves:
        raise UserError(
            f"config.statistics.modules is {section.modules!r}, which are compared by "
            "config.statistics.halves; it must be True"
        )
    return Statistics(
        section.noise_scale,
        section.preconditioned,
        section.halves,
        batches.has_agvm(config),
        tuple((name, pattern) for name, pattern in pairs),
        section.per_example,
        section.interval,
    )


def check(
    config: ConfigDict, mesh: Mesh, task: tasks.Task, changes: bool, group_replicas: int = 1
) -> None:
    """Refuses statistics that a config's step cannot measure, before the data is read.

    Args:
      config: of the run.
      mesh: over all devices.
      task: the learning problem.
      changes: whether the batch changes, so that an update may have any number of microbatches.
      group_replicas: number of devices over which a group of BatchNorm is spread.
    """
    asked = statistics_of(config)
    if not asked:
        return
    if task.model.carry_shape is not None:
        raise UserError(
            f"{_title(config)}, and the network {config.model.name!r} carries a state for each row "
            "of a whole batch, whose parts cannot be told apart; leave it out"
        )
    steps, shards = config.accumulation_steps, mesh_lib.num_batch_shards(mesh)
    devices = shards if config.parallel.backend == "shard_map" else 1
    if (asked.noise_scale or asked.preconditioned) and not changes and steps * devices == 1:
        raise UserError(
            f"{_title(config)}, which compares the parts of a batch, and config.accumulation_steps "
            "is 1; it must be at least 2, or config.parallel.backend be 'shard_map' on several "
            "devices"
        )
    halves = _title(config, None if asked.to_optimizer else "halves") if asked.halves else ""
    if asked.halves and devices > 1 and devices % 2:
        raise UserError(
            f"{halves}, which compares devices of even and of odd index under "
            f"config.parallel.backend='shard_map', and config.mesh splits the batch over {devices};"
            " it must be an even number, or the backend 'jit'"
        )
    if asked.halves and devices == 1 and not changes and steps % 2:
        raise UserError(
            f"{halves}, which compares even and odd microbatches, and config.accumulation_steps is "
            f"{steps}; it must be an even number, such as {steps + 1}"
        )
    # AGVM's halves are allowed: detectors, which it is for, often have BatchNorm over devices.
    measured = [key for key in _SWITCHES if getattr(asked, key)]
    if asked.to_optimizer:
        measured.remove("halves")
    if devices > 1 and group_replicas > 1 and measured:
        raise UserError(
            f"config.statistics.{measured[0]} is True, which compares the devices under "
            f"config.parallel.backend='shard_map', and by config.model.group_size="
            f"{config.model.get('group_size')} the examples of {group_replicas} devices share a "
            "group of BatchNorm, so that their gradients depend on each other; it must be at most "
            f"the {config.batch_size // steps // shards} of one device"
        )
    if asked.per_example:
        _check_rows(config, mesh, task, shards)


def _title(config: ConfigDict, key: str | None = None) -> str:
    """What asks for a statistic, or for the first there is, as the beginning of a sentence."""
    section = settings_of(config)
    if key is None:
        if batches.has_agvm(config):
            return "config.optimizer.agvm is given"
        key = next((each for each in _SWITCHES if section[each]), "per_example")
    if not config.statistics[key]:
        return f"config.batch_rule.name is {config.batch_rule.name!r}, which needs {_NAMES[key]}"
    return f"config.statistics.{key} is {section[key]}"


def _check_rows(config: ConfigDict, mesh: Mesh, task: tasks.Task, shards: int) -> None:
    """Refuses gradients of single examples where an example has none, or there are too few."""
    key, rows = "config.statistics.per_example", settings_of(config).per_example
    mesh_lib.check_divides(key, rows, shards, f"the {shards} devices of config.mesh")
    microbatch = config.batch_size // config.accumulation_steps
    if not 2 <= rows <= microbatch:
        raise UserError(
            f"{key} is {rows}; it must be at least 2, for a variance, and at most the {microbatch} "
            "examples of a microbatch, config.batch_size / config.accumulation_steps"
        )
    # Only tasks that mix examples have the attribute.
    mixed = getattr(task, "mixed_by", ())
    if mixed:
        raise UserError(
            f"{_title(config, 'per_example')}, and config.task.{mixed[0]} mixes pairs of examples, "
            "which have no gradient each; leave it out"
        )
    others = sorted(set(mesh.shape) - set(mesh_lib.BATCH_AXES))
    if others:
        raise UserError(
            f"{_title(config, 'per_example')}, for which a device has whole examples, and "
            f"config.mesh.{others[0]} is {mesh.shape[others[0]]}; leave it out"
        )


def check_state(config: ConfigDict, abstract: TrainState, train_set: data.Source) -> None:
    """Refuses statistics that a run's state or data cannot give, before anything compiles.

    Args:
      config: of the run.
      abstract: shapes and dtypes of its state.
      train_set: its data.
    """
    asked = statistics_of(config)
    if not asked:
        return
    if train_set.buckets is not None or train_set.streams is not None:
        what = "batches of like lengths" if train_set.streams is None else "streams of text"
        raise UserError(
            f"{_title(config)}, and {data.title(train_set)} is read in {what}, whose batches are "
            "not cut into parts; leave it out"
        )
    if asked.preconditioned:
        with naming("config.statistics.preconditioned"):
            check_second_moments(abstract)
    if asked.modules:
        with naming("config.statistics.modules"):
            modules.assign(abstract.params, [pattern for _, pattern in asked.modules])
    layers = parameters.leaf_paths(abstract.model_state)
    if asked.per_example and layers:
        layer = layers[0].rpartition("/")[0].partition("/")[2] or layers[0]
        raise UserError(
            f"{_title(config, 'per_example')}, and the model's layer {layer!r} keeps statistics of "
            "the batch, as BatchNorm, by which the gradient of one example depends on the others; "
            "leave it out"
        )


def describe(config: ConfigDict, mesh: Mesh) -> str:
    """Returns a line about the statistics for the terminal; '' without any."""
    asked, found = statistics_of(config), []
    if asked.noise_scale or asked.preconditioned:
        part = config.batch_size // config.accumulation_steps
        if config.parallel.backend == "shard_map":
            part //= mesh_lib.num_batch_shards(mesh)
        found.append(f"noise scale from parts of {part:,} examples")
    if asked.halves:
        found.append("similarity of two halves")
    if asked.per_example:
        found.append(f"variance of {asked.per_example:,} examples every {asked.interval:,} updates")
    return f"statistics of gradients: {', '.join(found)}" if found else ""
