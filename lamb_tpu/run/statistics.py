"""The statistics of gradients that a config asks for."""

import dataclasses

from jax.sharding import Mesh

from lamb_tpu import spec_keys
from lamb_tpu.errors import ABSENT, UserError, naming, out_of_range
from lamb_tpu.optim import modules
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.gradient_statistics import Statistics, check_second_moments
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import batches
from lamb_tpu.spec import Spec

SWITCHES = ("noise_scale", "preconditioned", "halves")
_NAMES = {
    "noise_scale": "the noise scale",
    "halves": "the similarity of two halves of the batch",
    "per_example": "the variance over examples",
}


def settings_of(spec: Spec) -> spec_keys.Statistics:
    """Returns config.statistics plus the settings that the batch rule and AGVM need.

    If the rule needs per-example gradients and config.statistics.per_example is 0, sets per_example
    to the number of examples in one microbatch.
    """
    needed = batches.required_statistics(spec)
    if spec.statistics.per_example:
        needed.pop("per_example", None)
    return dataclasses.replace(spec.statistics, **needed)


def statistics_of(spec: Spec) -> Statistics:
    """Returns the statistics that config.statistics asks for."""
    section = settings_of(spec)
    for key, lowest in (("per_example", 0), ("interval", 1)):
        if (value := getattr(section, key)) < lowest:
            raise out_of_range(f"config.statistics.{key}", value, f"at least {lowest}")
    if not 0 <= section.decay < 1:
        raise out_of_range("config.statistics.decay", section.decay, "at least 0 and below 1")
    pairs = section.modules
    with naming("config.statistics", vars(section)):
        modules.check_pairs("modules", pairs)
    if pairs and not section.halves:
        problem = "needs config.statistics.halves, which compares the modules"
        remedy = "set config.statistics.halves=True"
        raise UserError("config.statistics.modules", section.modules, problem, remedy)
    return Statistics(
        noise_scale=section.noise_scale,
        preconditioned=section.preconditioned,
        halves=section.halves,
        to_optimizer=batches.has_agvm(spec),
        modules=tuple((name, pattern) for name, pattern in pairs),
        per_example=section.per_example,
        interval=section.interval,
    )


def subject(spec: Spec, key: str | None = None) -> tuple[str, object, str]:
    """Returns the subject of an error about a statistic: the key that requests it, and the key's value.

    The third element is the beginning of the problem: '', or 'needs the noise scale, which ' if the
    key is a batch rule. Without `key`, takes the first statistic that the config asks for.
    """
    section = settings_of(spec)
    if key in (None, "halves") and batches.has_agvm(spec):
        return "config.optimizer.agvm", ABSENT, ""
    if key is None:
        key = next((each for each in SWITCHES if getattr(section, each)), "per_example")
    if not (value := getattr(spec.statistics, key)):
        return "config.batch_rule.name", spec.batch_rule.name, f"needs {_NAMES[key]}, which "
    return f"config.statistics.{key}", value, ""


def check_rows(spec: Spec, mesh: Mesh) -> None:
    """Rejects a config.statistics.per_example that does not fit the devices or a microbatch."""
    key, rows = "config.statistics.per_example", settings_of(spec).per_example
    if not rows:
        return
    shards = mesh_lib.num_batch_shards(mesh)
    mesh_lib.check_divides(key, rows, shards, f"the {shards} devices of config.mesh")
    microbatch = batches.granularity(spec)
    if not 2 <= rows <= microbatch:
        raise out_of_range(
            key,
            rows,
            f"2 to {microbatch}, the size of a microbatch (config.batch_size / "
            "config.accumulation_steps)",
        )


def check_state(asked: Statistics, abstract: TrainState) -> None:
    """Rejects statistics that need second moments or modules that the state does not have."""
    if asked.preconditioned:
        with naming("config.statistics.preconditioned"):
            check_second_moments(abstract)
    if asked.modules:
        with naming("config.statistics.modules"):
            modules.assign(abstract.params, [pattern for _, pattern in asked.modules])


def describe(spec: Spec, mesh: Mesh) -> str:
    """Returns a line about the statistics for the terminal; '' if there are none."""
    asked, items = statistics_of(spec), []
    if asked.noise_scale or asked.preconditioned:
        part = spec.batch_size // spec.accumulation_steps
        if spec.parallel.backend == "shard_map":
            part //= mesh_lib.num_batch_shards(mesh)
        items.append(f"noise scale from parts of {part:,} examples")
    if asked.halves:
        items.append("similarity of two halves")
    if asked.per_example:
        items.append(f"variance of {asked.per_example:,} examples every {asked.interval:,} updates")
    return f"statistics of gradients: {', '.join(items)}" if items else ""
