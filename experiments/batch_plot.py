"""The plot of a batch-scaling study: results at each batch, and curves at the largest."""

import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from experiments.records import Record
from lamb_tpu import style


class Line(NamedTuple):
    """An optimizer with its rule.

    Attributes:
      name: name in the legend.
      optimizer, variant: style of the line, see `style.line`.
      records: the line's runs, each with `batch`, `curve` ([progress, value] of each evaluation)
        and the final value, or None.
    """

    name: str
    optimizer: str
    variant: int
    records: Sequence[Record]


def draw(
    lines: Sequence[Line], path: pathlib.Path, key: str, label: str, better: str, title: str,
    length: str, progress: str,
) -> None:
    """Draws the mean over the seeds against the batch, and the curves at the largest batch.

    Args:
      lines: the lines; those without records are left out.
      path: the PNG.
      key: key of the value in a record. A run without a value, because it diverged, is left out.
      label: label of the value, with its unit.
      better: 'lower' or 'higher'.
      title: data and model.
      length: length of the runs, such as 'after 5 epochs'.
      progress: unit of a curve's first numbers.
    """
    lines = [line for line in lines if line.records]
    figure = style.figure(11, 5.0)
    figure.suptitle(title, fontsize=12)
    left, right = figure.subplots(1, 2)
    batches = sorted({record["batch"] for line in lines for record in line.records})
    for line in lines:
        values = {
            batch: [r[key] for r in line.records if r["batch"] == batch and r[key] is not None]
            for batch in batches
        }
        means = {batch: statistics.mean(found) for batch, found in values.items() if found}
        look = style.line(line.optimizer, line.variant)
        left.plot(list(means), list(means.values()), label=line.name, **look)
        for record in line.records:
            if record["batch"] == batches[-1] and record["curve"]:
                right.plot(*zip(*record["curve"]), **look, markersize=4)
    style.dress(left, length, "batch size (examples)", label, better)
    style.batch_axis(left, batches)
    style.dress(right, f"on the way, at batch {batches[-1]:,}", progress, label, better)
    figure.legend(loc="outside lower center", ncols=len(lines) or 1, frameon=False)
    figure.savefig(path)
