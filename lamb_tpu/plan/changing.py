"""The plan of a run in which the batch size changes: the time of its updates at each batch size.

An update of k microbatches takes the time of a step with k accumulation steps. Each further
iteration of the accumulation loop adds the same time, so a few programs serve all k: steps of up to
four microbatches are compiled, and the times of longer steps are interpolated or extrapolated from
compiled steps of four and eight. At sixteen microbatches the extrapolated time is within 0.01 % of
that of the compiled step (tests/plan/test_changing.py).
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError, shown
from lamb_tpu.files import buckets
from lamb_tpu.plan.cache import Cache
from lamb_tpu.plan.making import loader, make_plan
from lamb_tpu.plan.options import check_batch
from lamb_tpu.plan.report import Plan
from lamb_tpu.plan.stages import Along, BatchRow
from lamb_tpu.plan.totals import Stretch, evaluations, work_of
from lamb_tpu.run import batches
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.spec import Config, Spec, parse
from lamb_tpu.store.metrics import read_records

# Numbers of microbatches of two compiled steps. The time of a step with more than four microbatches
# is interpolated or extrapolated linearly from these steps.
_LINE = (4, 8)


def changes(config: Spec) -> bool:
    """Returns whether the batch size changes during a run of a config."""
    return batches.check_rule(config)[0] is not None


def make_changing_plan(
    config: Config,
    name: str,
    waiting: Callable[[str], Any] = contextlib.nullcontext,
    examples: int | None = None,
    cache: Cache | None = None,
    batches_of: str | None = None,
    gbps: float | None = None,
) -> Plan:
    """Compiles steps of several batch sizes; returns the plan of a run in which the batch size changes.

    Memory, collectives and step time describe the largest compiled step, which has at most eight
    microbatches. The cost of gradient statistics is not included.

    Args:
      config, name, waiting, examples, cache, gbps: see `making.make_plan`.
      batches_of: folder of a run: the plan uses that run's batch sizes, and scales that run's numbers
        of updates so that they have as many examples as the planned run. Required for a rule that
        chooses batches during the run.

    Raises:
      UserError: see `making.make_plan`; or `batches_of` is missing, has no effect, or is not the
        folder of a run in which the batch size changed.
    """
    config = parse(config)
    check_batch(config.batch_size)
    devices = topology_lib.devices(topology_lib.topology(name))
    run = prepare(config, None, devices, load=loader(config, examples))
    path = _path(run.recipe, config.batch_rule.name, batches_of)
    size = batches.granularity(config)
    plans: dict[int, Plan] = {}
    for count in sorted(_counts(path, size)):
        constant = at_microbatches(config, count, run.recipe)
        plans[count] = make_plan(constant, name, waiting, examples=examples, cache=cache, gbps=gbps)
        if not plans[count].fits:
            return plans[count]
    last = max(plans)
    rows = _rows(path, size, plans)
    work = work_of(run)._replace(
        updates=round(sum(row.updates for row in rows)),
        # The time of an evaluation is derived from the step whose plan is returned.
        batch_size=last * size,
        evaluations=evaluations(path, run.recipe.eval_every * run.recipe.batch_size),
    )
    return dataclasses.replace(
        plans[last],
        work=work,
        recipe=run.recipe,
        other_batch=None,
        along=Along(size, rows),
        compile_seconds=sum(plan.compile_seconds for plan in plans.values()),
    )


def at_microbatches(config: Spec, count: int, recipe: Recipe) -> Spec:
    """Returns the config with a constant batch of `count` microbatches and a constant schedule.

    Resets the schedule, because the learning rate does not affect the time of a step, and a warm-up in
    updates could be longer than this run.
    """
    default = Spec()
    return dataclasses.replace(
        config,
        batch_rule=default.batch_rule,
        schedule=default.schedule,
        batch_size=batches.granularity(config) * count,
        accumulation_steps=count,
        duration=f"{recipe.base_steps * recipe.batch_size} examples",
    )


def _path(recipe: Recipe, rule_name: str, batches_of: str | None) -> list[Stretch]:
    assert recipe.path is not None  # the batch changes
    if recipe.decides:
        if batches_of is None:
            raise UserError(
                "config.batch_rule.name",
                rule_name,
                "chooses its batches during the run",
                "give --batches-of=WORKDIR: the plan then uses the batches of the run in that folder",
            )
        return recorded(batches_of, recipe.path.total)
    if batches_of is not None:
        raise UserError(
            "--batches-of",
            batches_of,
            f"has no effect: config.batch_rule.name={rule_name!r} fixes the batches in advance",
            "leave --batches-of out",
        )
    firsts = [first for first, _ in recipe.path.segments]
    return [
        Stretch(end - first, recipe.path.examples(end) - recipe.path.examples(first))
        for first, end in zip(firsts, [*firsts[1:], recipe.path.updates], strict=True)
    ]


def recorded(workdir: str | os.PathLike[str], total: int) -> list[Stretch]:
    """Returns the updates between consecutive records of a run, scaled to `total` examples altogether.

    Raises:
      UserError: the folder has no records of a run in which the batch size changed.
    """
    records = read_records(buckets.parse(workdir, "--batches-of") / "metrics.jsonl", "train")
    if not records or "examples" not in records[-1]:
        raise UserError(
            "--batches-of",
            str(workdir),
            "has no records of a changing batch size",
            "give the folder of a run with config.batch_rule",
        )
    positions: list[tuple[Any, Any]] = [
        (0, 0),
        *((record.get("step"), record.get("examples")) for record in records),
    ]
    for (before, seen), (step, examples) in itertools.pairwise(positions):
        are_counts = all(type(each) is int and each < 2**63 for each in (step, examples))
        if not are_counts or not step > before or not examples > seen:
            raise UserError(
                "--batches-of",
                str(workdir),
                f"has records that do not increase: after update {before} with {seen} examples "
                f"comes update {shown(step)} with {shown(examples)} examples",
                "give the folder of another run",
            )
    factor = total / positions[-1][1]
    return [
        Stretch((step - before) * factor, (examples - seen) * factor)
        for (before, seen), (step, examples) in itertools.pairwise(positions)
    ]


def _counts(path: Sequence[Stretch], size: int) -> set[int]:
    """Returns the numbers of microbatches for which a step is compiled."""
    return {end for updates, examples in path for end in _ends(examples / updates / size)}


def _ends(count: float) -> tuple[int, int]:
    """Returns the numbers of microbatches of the two compiled steps that determine the time at `count`."""
    return _LINE if count > _LINE[0] else (max(1, math.floor(count)), math.ceil(count))


def _rows(path: Sequence[Stretch], size: int, plans: Mapping[int, Plan]) -> tuple[BatchRow, ...]:
    """Returns a row for each stretch, with the times of an update; None stands for unknown times."""
    rows = []
    for updates, examples in path:
        count = examples / updates / size
        low, high = _ends(count)
        weight = (count - low) / (high - low) if high > low else 0.0
        times = [plans[each].times for each in (low, high)]
        compute = network = None
        if times[0] is not None and times[1] is not None:
            pairs = list(zip(*times, strict=True))
            compute = tuple(a.compute + weight * (b.compute - a.compute) for a, b in pairs)
            network = tuple(a.exposed + weight * (b.exposed - a.exposed) for a, b in pairs)
        rows.append(BatchRow(updates, examples, compute, network))
    return tuple(rows)
