"""The picture of a batch-scaling study: what came out at each batch, and the way at the largest."""

import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from experiments.records import Record


class Line(NamedTuple):
    """An optimizer with its rule.

    Attributes:
      name: for the legend.
      color, marker: as Matplotlib has them.
      records: its runs, each with `batch`, `curve` ([progress, value] of each evaluation) and the
        value that came out, or None.
    """

    name: str
    color: str
    marker: str
    records: Sequence[Record]


def draw(
    lines: Sequence[Line], path: pathlib.Path, key: str, label: str, title: str, progress: str
) -> None:
    """Draws the mean over the seeds against the batch, and the curves at the largest batch.

    Args:
      lines: those without a record are left out.
      path: the PNG.
      key: of the value in a record. A run without one, because it diverged, is left out.
      label: what the value is.
      title: how long the runs are.
      progress: what the first numbers of a curve count.
    """
    lines = [line for line in lines if line.records]
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = sorted({record["batch"] for line in lines for record in line.records})
    for line in lines:
        values = {
            batch: [r[key] for r in line.records if r["batch"] == batch and r[key] is not None]
            for batch in batches
        }
        means = {batch: statistics.mean(found) for batch, found in values.items() if found}
        style = {"color": line.color, "marker": line.marker}
        left.plot(list(means), list(means.values()), label=line.name, **style)
        names = iter([line.name])  # once in the legend, whatever the number of seeds
        for record in line.records:
            if record["batch"] == batches[-1] and record["curve"]:
                right.plot(*zip(*record["curve"]), label=next(names, None), **style)
    left.set_xscale("log", base=2)
    left.set_xticks(batches, [f"{batch:,}" for batch in batches])
    left.set_xlabel("batch (examples)")
    left.set_ylabel(label)
    left.set_title(title)
    right.set_xlabel(progress)
    right.set_title(f"at batch {batches[-1]:,}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path)
