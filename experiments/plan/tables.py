"""Planned values for the papers' tables: experiments/planned.json, from published.toml.

A run in published.toml names the table cells whose time or rate it gives. The run's programs are
compiled once; rows.json stores their figures. The planned values follow from these figures and the
calibrated constants, as in lamb_tpu.plan.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.plan import interval, page
from experiments.plan.rows import FOLDER, Phase, Run, Source
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.topology import topology
from lamb_tpu.errors import UserError, listed
from lamb_tpu.files import writing
from lamb_tpu.reproduce import planned
from lamb_tpu.reproduce.planned import Planned
from lamb_tpu.store import checkout

PAPERS = FOLDER.parent
RATE = "examples_per_second"
_TIMES = {"hours": 3600.0, "minutes": 60.0}
_PHASE = re.compile(r",phase=\d")

SavedRows = Mapping[str, Mapping[str, Any]]


def missing(sources: Sequence[Source], saved: SavedRows) -> list[tuple[str, Phase]]:
    """Returns the slice and phase of each program that the tables need and that is not compiled."""
    wanted = {
        phase.key(run.topology): (run.topology, phase)
        for source in sources
        for run in source.runs
        if run.cells
        for phase in run.phases
    }
    return [each for key, each in wanted.items() if key not in saved]


def entries(sources: Sequence[Source], saved: SavedRows, commit: str) -> list[Planned]:
    """Returns the planned value of every cell whose programs are compiled and fit into memory."""
    return [
        entry
        for source in sources
        for run in source.runs
        if run.cells
        for entry in _entries(run, saved, commit)
    ]


def _entries(run: Run, saved: SavedRows, commit: str) -> Iterator[Planned]:
    sample = page.sample_of(run, saved)
    if sample is None:
        return
    constants = CALIBRATED.for_generation(topology(run.topology).version).each
    low, value, high = (interval.seconds(each, sample) for each in constants)
    first = saved[run.phases[0].key(run.topology)]
    examples = first["batch_size"] * run.phases[0].updates
    for table, cell, metric in run.cells:
        if metric == RATE:
            times = [examples / 1000 / seconds for seconds in (high, value, low)]
            unit = "images/ms"
        elif metric in _TIMES:
            times, unit = [seconds / _TIMES[metric] for seconds in (low, value, high)], metric
        else:
            raise UserError(
                f"published.toml: the metric of {cell} in {table}",
                metric,
                "is unknown",
                f"use {listed((RATE, *_TIMES))}",
            )
        yield Planned(
            table=table,
            cell=cell,
            metric=metric,
            unit=unit,
            low=_rounded(times[0]),
            value=_rounded(times[1]),
            high=_rounded(times[2]),
            command=command(run, metric),
            commit=commit,
            versions=dict(first["versions"]),
        )


def command(run: Run, metric: str) -> str:
    """Returns the command that plans a run."""
    first = run.phases[0]
    flags = [f"--config.{key}={value}" for key, value in first.overrides.items()]
    recipe = first.recipe
    if len(run.phases) > 1:  # without this argument, the recipe has both phases
        recipe = _PHASE.sub("", recipe)
    elif metric in _TIMES:
        flags.append(f"--config.duration={math.ceil(first.updates)} steps")
    return shlex.join(
        [
            "python",
            "-m",
            "lamb_tpu.plan",
            f"--config={recipe}",
            *flags,
            f"--topology={run.topology}",
        ]
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def write(sources: Sequence[Source], saved: SavedRows) -> str:
    """Writes planned.json, and returns its path; an unchanged value keeps its commit.

    Raises:
      UserError: the code is not committed, or planned.json is damaged.
    """
    commit = checkout.commit()
    if commit is None or checkout.is_changed(commit):
        raise UserError(
            "planned.json",
            problem="would name no commit for its values",
            remedy="commit the code first",
        )
    old = {each.key: each for each in planned.read(PAPERS)}
    values = entries(sources, saved, commit)
    for index, each in enumerate(values):
        before = old.get(each.key)
        if before is not None and _same(before, each):
            values[index] = before
    path = PAPERS / planned.FILE
    writing.replace(path, planned.dump(values))
    return str(path)


def _same(first: Planned, second: Planned) -> bool:
    return all(
        getattr(first, name) == getattr(second, name)
        for name in first.__struct_fields__
        if name != "commit"
    )
