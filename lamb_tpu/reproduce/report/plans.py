"""Learning rates of a table's cells over their runs, as the configs plan them."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from lamb_tpu import style
from lamb_tpu.config import flatten
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.tables import Scale, Table
from lamb_tpu.run import phases, recipe

_POINTS = 300
Points = tuple[tuple[float, float], ...]


class Plan(NamedTuple):
    """The learning rate of a cell's first stage.

    Attributes:
      cell: name of the cell.
      optimizer: name of its optimizer in the config.
      points: (updates in percent of the run, learning rate), ascending; phases follow one another.
    """

    cell: str
    optimizer: str
    points: Points


def plans(table: Table, scale: Scale, found: Sequence[Summary]) -> list[Plan]:
    """Returns the plan of each cell that can be run.

    A cell whose durations are in epochs has one only if the scale says how many examples an epoch
    has.
    """
    made = []
    for summary in found:
        if summary.cell.unknown:
            continue
        chosen = summary.records[0].get("chosen") if summary.records else None
        job = Job(table, scale, summary.cell, 0, None, 1.0 if chosen is None else chosen)
        config = jobs_lib.stages(job)[0].config()
        parts = [phase.config for phase in phases.split(config)]
        if scale.examples or not any(map(_has_epochs, parts)):
            optimizer = parts[0].optimizer.name
            made.append(Plan(summary.cell.name, optimizer, _points(parts, scale.examples or 1)))
    return made


def draw(made: Sequence[Plan]) -> Figure:
    """Plots the plans: axes for each optimizer, since their rates differ by orders of magnitude.

    Cells with the same plan share a line. A line without a name is of all cells of its optimizer.
    """
    groups: dict[str, dict[Points, list[str]]] = {}
    for plan in made:
        groups.setdefault(plan.optimizer, {}).setdefault(plan.points, []).append(plan.cell)
    columns = len(groups) if len(groups) < 4 else 2 if len(groups) == 4 else 3
    rows = -(-len(groups) // columns)
    figure = style.figure(7.5 if columns == 1 else 3.9 * columns, 3.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (optimizer, lines) in zip(panels, groups.items()):
        # Neither end of the colour map: one is hard to see on black, the other on white.
        colors = matplotlib.colormaps[style.SEQUENCE](np.linspace(0.35, 0.8, len(lines)))
        for color, (points, cells) in zip(colors, lines.items(), strict=True):
            look = pictures.looks({"": optimizer})[""] if len(lines) == 1 else {"color": color}
            label = cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more"
            axes.plot(*zip(*points), **{**look, "marker": ""}, label=label)
        style.dress(
            axes, pictures.optimizer_name(optimizer), "updates (% of the run)", "learning rate"
        )
        axes.set_ylim(bottom=0)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=7)
    for axes in panels[len(groups) :]:
        axes.remove()
    return figure


def _has_epochs(config: ConfigDict) -> bool:
    texts = [config.duration, *flatten(config.schedule).values()]
    return any(isinstance(text, str) and "epoch" in text for text in texts)


def _points(configs: Sequence[ConfigDict], examples: int) -> Points:
    recipes = [recipe.resolve(config, examples) for config in configs]
    whole = sum(part.total_steps for part in recipes)
    found, before = list[tuple[float, float]](), 0
    for part in recipes:
        # The same number for every run, since JAX compiles for each; a short run has some twice.
        steps = np.linspace(0, part.total_steps - 1, _POINTS).round().astype(np.int32)
        at = part.learning_rate(steps) if part.path is None else part.learning_rates[steps]
        rates = dict(zip(steps.tolist(), np.asarray(at).tolist()))
        found += [(100 * (before + step) / whole, rate) for step, rate in rates.items()]
        before += part.total_steps
    return tuple(found)
