"""A plan of a run whose batch changes: times of its updates along the path of batches.

An update of k microbatches is priced by the step of one batch with k accumulation steps, whose
loop adds the same time for each further microbatch. So a few programs serve all k: those of up to
four microbatches have each their own, and more lie on the line through four and eight. At sixteen
the line is within 0.01 % of the program's own estimate (tests/plan/test_changing.py).
"""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu.config import base_config
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError
from lamb_tpu.plan.cache import Cache
from lamb_tpu.plan.making import loader, make_plan
from lamb_tpu.plan.report import Along, Plan, Row
from lamb_tpu.plan.totals import work_of
from lamb_tpu.run import batches
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.store.metrics import read_records

# More microbatches lie on the line through these two.
_LINE = (4, 8)


class Stretch(NamedTuple):
    """Updates of one batch size, or of one on average; both numbers may be fractions."""

    updates: float
    examples: float


def changes(config: ConfigDict) -> bool:
    """Returns whether the batch of a config changes."""
    return batches.check_rule(config)[0] is not None


def make_changing_plan(
    config: ConfigDict,
    name: str,
    waiting: Callable[[str], Any] = contextlib.nullcontext,
    examples: int | None = None,
    cache: Cache | None = None,
    batches_of: str | None = None,
    gbps: float | None = None,
) -> Plan:
    """Compiles steps of a config whose batch changes; returns the plan of its run.

    Memory, collectives and the time of a step are those of the largest step that is compiled, of at
    most eight microbatches. Statistics of gradients are left out.

    Args:
      config, name, waiting, examples, cache: see `making.make_plan`.
      batches_of: folder of a run whose batches are taken, stretched to the examples of this one; a
        rule that decides during the run needs it.
      gbps: see `making.make_plan`.

    Raises:
      UserError: see `making.make_plan`; or `batches_of` is missing, has no meaning, or holds no run
        whose batch changed.
    """
    devices = topology_lib.devices(topology_lib.topology(name))
    run = prepare(config, None, devices, load=loader(config, examples))
    path = _path(run.recipe, config, batches_of)
    size = batches.quantum(config)
    found: dict[int, Plan] = {}
    for count in sorted(_counts(path, size)):
        found[count] = make_plan(
            at_microbatches(config, count, run.recipe), name, waiting, examples, cache, gbps
        )
        if not found[count].fits:
            return found[count]
    last = max(found)
    rows = _rows(path, size, found)
    work = work_of(run)._replace(
        updates=round(sum(row.updates for row in rows)),
        # An evaluation is priced by the step whose plan this is.
        batch_size=last * size,
        evaluations=_evaluations(path, run.recipe),
    )
    return dataclasses.replace(
        found[last],
        work=work,
        recipe=run.recipe,
        other_batch=None,
        along=Along(size, rows),
        compile_seconds=sum(plan.compile_seconds for plan in found.values()),
    )


def at_microbatches(config: ConfigDict, count: int, recipe: Recipe) -> ConfigDict:
    """Returns the config at one batch of so many microbatches.

    The schedule is constant: a step takes the same time at any rate, and a warm-up in updates might
    be longer than a run of so few.
    """
    changed = config.copy_and_resolve_references()
    changed.batch_rule = ConfigDict()
    changed.schedule = base_config().schedule
    changed.batch_size, changed.accumulation_steps = batches.quantum(config) * count, count
    changed.duration = f"{recipe.base_steps * recipe.batch_size} examples"
    return changed


def _path(recipe: Recipe, config: ConfigDict, batches_of: str | None) -> list[Stretch]:
    assert recipe.path is not None  # the batch changes
    rule = f"config.batch_rule.name is {config.batch_rule.name!r}"
    if recipe.decides:
        if batches_of is None:
            raise UserError(
                f"{rule}, which decides during the run; give --batches-of=WORKDIR, the folder of a "
                "run whose batches are to be taken"
            )
        return recorded(batches_of, recipe.path.total)
    if batches_of is not None:
        raise UserError(
            f"--batches-of is {batches_of!r}, and {rule}, whose batches are known; leave it out"
        )
    firsts = [first for first, _ in recipe.path.pieces]
    return [
        Stretch(end - first, recipe.path.examples(end) - recipe.path.examples(first))
        for first, end in zip(firsts, [*firsts[1:], recipe.path.updates], strict=True)
    ]


def recorded(workdir: str | os.PathLike[str], total: int) -> list[Stretch]:
    """Returns the updates between the records of a run, stretched to `total` examples.

    Raises:
      UserError: the folder holds no run whose batch changed.
    """
    records = read_records(pathlib.Path(workdir) / "metrics.jsonl", "train")
    if not records or "examples" not in records[-1]:
        raise UserError(
            f"--batches-of is {str(workdir)!r}, a run whose batch did not change; give the folder "
            "of one with config.batch_rule"
        )
    places = [(0, 0), *((record["step"], record["examples"]) for record in records)]
    factor = total / places[-1][1]
    return [
        Stretch((step - before) * factor, (examples - seen) * factor)
        for (before, seen), (step, examples) in itertools.pairwise(places)
    ]


def _counts(path: Sequence[Stretch], size: int) -> set[int]:
    """The numbers of microbatches whose steps are compiled."""
    found: set[int] = set()
    for updates, examples in path:
        count = examples / updates / size
        near = {max(1, math.floor(count)), math.ceil(count)}
        found |= set(_LINE) if count > _LINE[0] else near
    return found


def _rows(path: Sequence[Stretch], size: int, found: Mapping[int, Plan]) -> tuple[Row, ...]:
    """The stretches with the times of their updates; without times if a program has none."""
    rows = []
    for updates, examples in path:
        count = examples / updates / size
        if count > _LINE[0]:
            low, high = _LINE
        else:
            low, high = max(1, math.floor(count)), math.ceil(count)
        part = (count - low) / (high - low) if high > low else 0.0
        times = [found[each].times for each in (low, high)]
        compute = network = None
        if times[0] is not None and times[1] is not None:
            pairs = list(zip(*times, strict=True))
            compute = tuple(a.compute + part * (b.compute - a.compute) for a, b in pairs)
            network = tuple(a.exposed + part * (b.exposed - a.exposed) for a, b in pairs)
        rows.append(Row(updates, examples, compute, network))
    return tuple(rows)


def _evaluations(path: Sequence[Stretch], recipe: Recipe) -> int:
    """Number of evaluations: an update that reaches several of their places has one."""
    every, place, found = recipe.eval_every * recipe.batch_size, 0.0, 0.0
    for updates, examples in path:
        passed = times_passed(place + examples, every) - times_passed(place, every)
        place, found = place + examples, found + min(updates, passed)
    # The last update is evaluated in any case.
    last = place - path[-1].examples / path[-1].updates
    return round(found) + (times_passed(place, every) == times_passed(last, every))


def times_passed(place: float, every: float) -> int:
    """Returns the multiples of `every` above 0 up to `place`.

    >>> times_passed(29.9, 10), times_passed(30, 10)
    (2, 3)
    """
    return math.floor(place / every + 1e-9)
