"""Planned learning rates of a table's cells over their runs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.report import lines as lines_lib
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.tables import Scale, Table
from lamb_tpu.run import phases, recipe
from lamb_tpu.spec import Spec, flatten

_POINTS = 300
Points = tuple[tuple[float, float], ...]


class RateCurve(NamedTuple):
    """The learning rate of a cell's first stage.

    The points are pairs of the percentage of completed updates and the learning rate, in ascending order.
    The phases of the stage follow one another.
    """

    cell: str
    optimizer: str
    points: Points


def plans(table: Table, scale: Scale, summaries: Sequence[Summary]) -> list[RateCurve]:
    """Returns the planned learning rate of each cell that can be run.

    Skips cells with durations in epochs if the scale does not give the size of an epoch.
    """
    curves = []
    for summary in summaries:
        if summary.cell.unknown:
            continue
        config = jobs_lib.stages(summary.job(table, scale))[0].config()
        configs = [phase.config for phase in phases.split(config)]
        if scale.examples or not any(map(_has_epochs, configs)):
            optimizer = configs[0].optimizer.name
            curves.append(
                RateCurve(summary.cell.name, optimizer, _points(configs, scale.examples or 1))
            )
    return curves


def draw(curves: Sequence[RateCurve]) -> Figure:
    """Plots the planned learning rates.

    Each optimizer has separate axes, because rates differ by orders of magnitude. Cells with the same plan
    share a line. Lines that would look alike are split among several axes.
    """
    groups: dict[str, dict[Points, list[str]]] = {}
    for plan in curves:
        groups.setdefault(plan.optimizer, {}).setdefault(plan.points, []).append(plan.cell)
    split: list[tuple[str, str, dict[str, Points]]] = []
    for optimizer, lines in groups.items():
        labelled = {_label(cells): points for points, cells in lines.items()}
        chunks = lines_lib.chunks(lines_lib.optimizer_name(optimizer), labelled)
        split += [(optimizer, title, chunk) for title, chunk in chunks.items()]
    figure, panels = style.stacked([1.9] * len(split), [list(lines) for _, _, lines in split])
    first: dict[str, Axes] = {}
    for panel, (optimizer, title, drawn) in zip(panels, split, strict=True):
        axes = panel.subplots()
        if first.setdefault(optimizer, axes) is not axes:
            axes.sharey(first[optimizer])
        looks = lines_lib.looks(dict.fromkeys(drawn, optimizer))
        for number, (label, points) in enumerate(drawn.items()):
            look = style.sparse(looks[label], len(points), number)
            axes.plot(*zip(*points), **look, linewidth=1.2, label=label)
        style.dress(axes, title, "updates (% of the run)", "learning rate")
        style.legend_below(panel)
    for axes in first.values():
        axes.set_ylim(bottom=0)
    return figure


def _label(cells: Sequence[str]) -> str:
    return cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more"


def _has_epochs(config: Spec) -> bool:
    texts = [config.duration, *flatten(config.schedule).values()]
    return any(isinstance(text, str) and "epoch" in text for text in texts)


def _points(configs: Sequence[Spec], examples: int) -> Points:
    recipes = [recipe.resolve(config, examples) for config in configs]
    total = sum(phase.total_steps for phase in recipes)
    points, offset = list[tuple[float, float]](), 0
    for phase in recipes:
        # Use the same number of points for every run, because JAX compiles for each number; short
        # runs repeat some points.
        steps = np.linspace(0, phase.total_steps - 1, _POINTS).round().astype(np.int32)
        at = phase.learning_rate(steps) if phase.path is None else phase.learning_rates[steps]
        rates = dict(zip(steps.tolist(), np.asarray(at).tolist()))
        points += [(100 * (offset + step) / total, rate) for step, rate in rates.items()]
        offset += phase.total_steps
    return tuple(points)
