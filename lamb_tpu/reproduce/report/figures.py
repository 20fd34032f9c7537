"""Figures of a table's runs: metric by batch size, training curves, and trust ratios."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.reproduce.report import batches, training
from lamb_tpu.reproduce.results import Record
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.tables import Scale

# The caption of each figure.
CAPTIONS = {
    "batches": "Mean over the seeds with its 95 % interval (Student's t); small points are single "
    "seeds. Intervals wider than the axes are clipped. A mean outside the axes is annotated at the "
    "edge with an arrow. ×2 at the edge means that two runs diverged; no mean includes them. If "
    "cells of one optimizer have the same batch size, each cell is a point at its average batch.",
    "training": "One line per run with a recorded curve. If some runs have no curve, the legend gives "
    "the number of runs with a curve. ↑ annotates the largest value above the axes.",
    "ratios": "Trust ratios of the adapted layers, from the first layer to the last, for the first "
    "seed and for each optimizer's smallest and largest batch; grey where the ratio is undefined.",
    "plans": "Learning rate over the run, as set by the config.",
}
_LABELS = 34  # maximum number of layer names; with more layers, only every n-th layer is named


def all_of(scale: Scale, summaries: Sequence[Summary]) -> dict[str, Figure]:
    """Returns the figures of a table at a scale, by name; omits figures without content."""
    measured = [summary for summary in summaries if summary.records]
    drawn = {}
    if batches.has_curve(measured):
        drawn["batches"] = batches.draw(measured, scale.metric)
    if training.quantities(measured, scale.metric):
        drawn["training"] = training.draw(measured, scale.metric)
    if any(_adapting(record) for summary in measured for record in summary.records):
        drawn["ratios"] = ratios(measured)
    return drawn


def ratios(measured: Sequence[Summary]) -> Figure:
    """Plots the trust ratio of each layer over training.

    Shows the cells with the smallest and the largest batch of each optimizer.
    """
    by_optimizer: dict[str, list[tuple[str, Record]]] = {}
    for summary in measured:
        record = summary.records[0]
        if _adapting(record):
            by_optimizer.setdefault(record["optimizer"], []).append((summary.cell.name, record))
    chosen: dict[str, Record] = {}
    for cells in by_optimizer.values():
        cells.sort(key=lambda pair: pair[1]["batch"])
        chosen |= dict([cells[0], cells[-1]])
    heights = [0.6 + min(max(0.18 * len(_adapting(r)), 1.0), 6.0) for r in chosen.values()]
    figure = style.figure(style.WIDTH, sum(heights) + 0.4 * len(heights))
    panels = figure.subplots(len(chosen), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, record) in zip(panels, chosen.items(), strict=True):
        histories = _adapting(record)
        layers = list(histories)
        steps = [step for step, _ in histories[layers[0]]]
        values = [
            [np.nan if value is None else value for _, value in history]
            for history in histories.values()
        ]
        style.heat_map(axes, "trust ratio", steps, np.array(values))
        axes.set_title(f"{name}, batch {record['batch']:,}", fontsize=11)
        names = style.layer_names(layers)
        stride = -(-len(layers) // _LABELS)
        # Row n of the map extends from n to n + 1, so its label is at n + 0.5.
        axes.set_yticks(np.arange(0, len(layers), stride) + 0.5, names[::stride])
    return figure


def _adapting(record: Record) -> dict[str, list[tuple[int, float | None]]]:
    """Returns the trust ratios of the layers that adapt; other layers only have ratios of 1 or None."""
    return {
        layer: history
        for layer, history in record["ratios"].items()
        if any(value not in (None, 1) for _, value in history)
    }
