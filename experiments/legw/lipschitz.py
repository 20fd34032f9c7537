"""Plots the local Lipschitz estimate of runs at several batch sizes, by epochs and by updates.

  python -m experiments.legw.lipschitz RUN RUN RUN --output=lipschitz.svg

Train each RUN, a workdir, with --config.log.lipschitz_rows=256. The command marks the peak of each curve and
prints a table of the peaks. With --write, it also writes the record, the figure and the page beside
this file. Without a RUN, the figure and the page are made from the committed record.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lamb_tpu import cli, style, terminal
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.reproduce.results import machine
from lamb_tpu.store import runs

RECORD = pathlib.Path(__file__).with_suffix(".json")
WINDOW = 5  # records in a median
# Keys of a run that the record stores in addition to its curve.
_KEYS = {
    "batch": "batch_size",
    "seed": "seed",
    "rows": "log.lipschitz_rows",
    "data": "data.name",
    "model": "model.name",
    "optimizer": "optimizer.name",
    "scaling": "schedule.scaling",
    "duration": "duration",
}


def read(path: str) -> dict[str, Any]:
    """Returns the curve of the run in a folder, and the settings of its training.

    Raises:
      UserError: the folder holds no run, or its records have no estimate.
    """
    run = runs.read(path, "RUN")
    records = [each for each in run.records("train") if "lipschitz" in each]
    if not records:
        raise UserError(
            run.metrics,
            problem="has no record with a local Lipschitz estimate",
            remedy="train with --config.log.lipschitz_rows=256",
        )
    columns = ("step", "epoch", "lipschitz", "learning_rate")
    receipt = run.receipt()
    return {
        **{name: run.config.get(key) for name, key in _KEYS.items()},
        **{
            name: receipt.get(name)
            for name in ("commit", "jax", "device", "devices", "cores", "processor")
        },
        **{name: [each[name] for each in records] for name in columns},
    }


def smooth(values: Sequence[float]) -> list[float]:
    """Returns moving medians of `WINDOW` values, or of fewer values at the ends."""
    half = WINDOW // 2
    return [
        statistics.median(values[max(0, position - half) : position + half + 1])
        for position in range(len(values))
    ]


def peak(run: Mapping[str, Any]) -> int:
    """Returns the index of the largest moving median of a run's curve.

    Single estimates are noisy: late in training, the gradient of a few examples is small.
    """
    medians = smooth(run["lipschitz"])
    return max(range(len(medians)), key=lambda position: medians[position])


def rise(run: Mapping[str, Any]) -> int:
    """Returns the first index at which the moving median is at least half of its maximum."""
    medians = smooth(run["lipschitz"])
    return next(position for position, value in enumerate(medians) if 2 * value >= max(medians))


def table(curves: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of the peaks, by batch."""
    lines = [
        "| batch | peak of medians | at epoch | after updates | learning rate at the peak | "
        "half of the peak at epoch | largest estimate, its epoch | first estimate | epochs trained |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in curves:
        at, values, rates = peak(run), run["lipschitz"], run["learning_rate"]
        most = values.index(max(values))
        lines.append(
            f"| {run['batch']:,} | {smooth(values)[at]:.3g} | {run['epoch'][at]:.3g} | "
            f"{run['step'][at]:,} | {rates[at]:.3g} of {max(rates):.3g} | "
            f"{run['epoch'][rise(run)]:.3g} | {values[most]:.3g}, {run['epoch'][most]:.3g} | "
            f"{values[0]:.3g} | {run['epoch'][-1]:.3g} |"
        )
    return "\n".join(lines) + "\n"


def draw(curves: Sequence[Mapping[str, Any]]) -> Figure:
    """Plots every curve by epochs and by updates, and marks the curve's peak."""
    figure = style.figure(style.WIDTH, 6.4)
    panels = figure.subplots(2, 1, sharey=True)
    for number, run in enumerate(curves):
        look, at, medians = style.numbered(number), peak(run), smooth(run["lipschitz"])
        for axes, clock in zip(panels, ("epoch", "step"), strict=True):
            axes.plot(run[clock], run["lipschitz"], color=look["color"], linewidth=0.8, alpha=0.4)
            line = {key: value for key, value in look.items() if key != "marker"}
            axes.plot(run[clock], medians, **line, linewidth=1.4)
            axes.plot(
                run[clock][at],
                medians[at],
                color=look["color"],
                marker=look["marker"],
                markersize=8,
                linestyle="none",
            )
            axes.plot([], [], **look, linewidth=1.4, label=f"{run['batch']:,}")
            axes.axvline(run[clock][at], color=look["color"], linestyle=":", linewidth=0.8)
    style.dress(panels[0], "by epochs", "epochs", "local Lipschitz estimate |g'Hg| / |g|²")
    style.dress(panels[1], "by updates", "completed updates", panels[0].get_ylabel())
    for axes in panels:
        axes.set_xscale("log")
        style.log_axis(axes)
        axes.xaxis.set_major_formatter("{x:,g}")
    style.legend_below(figure, title=f"batch; bold: medians of {WINDOW} estimates, with their peak")
    return figure


def page(curves: Sequence[Mapping[str, Any]]) -> str:
    """Returns the Markdown page of the record."""
    first = curves[0]
    made_by = sorted(set(map(machine, curves)))
    return f"""# The local Lipschitz estimate during training

The estimate is the curvature of the training loss along its gradient, L = |g'Hg| / |g|², on the same
{first["rows"]} training examples in every run. The runs train `{first["model"]}` on {first["data"]} with
{first["optimizer"]}; LEGW sets learning rates and warm-ups. According to the LEGW paper (recalled), the
estimate peaks at a later epoch if the batch is larger. Single estimates are noisy, so the table has the peak
of the moving median of {WINDOW} records. A later peak can be as high as the first, so the table also has the
first epoch at which the median is half of the peak. Each batch has one run, with seed {first["seed"]}. The
last column is the length of the run; a longer run might have a later peak. The median was chosen after the
single estimates had been seen, so the table also has the largest single estimate.

Made by: {"; ".join(made_by)}.

![The estimate against epochs and updates, a curve for each batch](lipschitz.svg)

{table(curves)}
Commands, with the batch size N (some batch sizes need other values of `--config.accumulation_steps` and
`--config.duration`, which the first command also takes):
`python -m lamb_tpu.train --config=configs/mnist_lstm.py:batch=N --workdir=runs/N
--config.log.lipschitz_rows={first["rows"]} --config.log.every='0.1 epochs'`, then `python -m
experiments.legw.lipschitz runs/* --write`. Curves: lipschitz.json.
"""


def main(options: argparse.Namespace) -> None:
    """Prints the table and draws the figure; with --write also writes the page and the record."""
    output = RECORD.with_suffix(".svg") if options.write else options.output
    path = style.figure_path(output, "--output", ".svg")
    if options.runs:
        curves = sorted((read(run) for run in options.runs), key=lambda run: run["batch"])
    else:
        curves = json.loads(RECORD.read_text())
    writing.replace(path, style.svg(draw(curves)), "--output")
    if options.write:
        lines = ",\n".join(json.dumps(run) for run in curves)
        writing.replace(RECORD, f"[\n{lines}\n]\n", "--write")
        writing.replace(RECORD.with_suffix(".md"), page(curves), "--write")
    print(f"{table(curves)}\n{path}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m experiments.legw.lipschitz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output",
        default="lipschitz.svg",
        metavar="FILE.svg",
        help="the figure (default: %(default)s)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write record, figure and page beside this file instead",
    )
    return parser.parse_all(arguments)


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # absl would parse these flags again, and would reject them
    cli.run_main(lambda: main(_parse(given)))
