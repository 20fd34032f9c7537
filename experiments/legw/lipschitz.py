"""Draws the local Lipschitz estimate of runs at several batches against epochs and updates.

  python -m experiments.legw.lipschitz RUN RUN RUN --output=lipschitz.svg

The runs were trained with --config.log.lipschitz_rows=256. The peak of each curve is marked, and a
table of the peaks is printed. With --write the record, the picture and the page beside this file
are made from the runs; without a RUN they are made again from the record.
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
from lamb_tpu.files import buckets, writing
from lamb_tpu.reproduce.results import machine
from lamb_tpu.store import runs

RECORD = pathlib.Path(__file__).with_suffix(".json")
WINDOW = 5  # records in a median
# Keys of a run that its point of the record holds, beside its curve.
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
    """Returns the curve of a run's folder with what it was trained by.

    Raises:
      UserError: the folder holds no run, or its records have no estimate.
    """
    run = runs.read(path, "RUN")
    records = [each for each in run.records("train") if "lipschitz" in each]
    if not records:
        raise UserError(
            f"{run.metrics} has no record with the local Lipschitz estimate; train with "
            "--config.log.lipschitz_rows=256"
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
    """Returns the median of each value and its neighbours, `WINDOW` together, fewer at the ends."""
    half = WINDOW // 2
    return [
        statistics.median(values[max(0, place - half) : place + half + 1])
        for place in range(len(values))
    ]


def peak(run: Mapping[str, Any]) -> int:
    """Returns the place of the largest median in a run's curve.

    Single estimates jump: late in training the gradient of few rows is small.
    """
    medians = smooth(run["lipschitz"])
    return max(range(len(medians)), key=lambda place: medians[place])


def rise(run: Mapping[str, Any]) -> int:
    """Returns the first place at which the median is at least half of its peak."""
    medians = smooth(run["lipschitz"])
    return next(place for place, value in enumerate(medians) if 2 * value >= max(medians))


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns the peaks as Markdown, by batch."""
    lines = [
        "| batch | peak of medians | at epoch | after updates | rate, of the largest | "
        "half first at epoch | largest estimate, at epoch | first estimate | epochs trained |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in found:
        at, values, rates = peak(run), run["lipschitz"], run["learning_rate"]
        most = values.index(max(values))
        lines.append(
            f"| {run['batch']:,} | {smooth(values)[at]:.3g} | {run['epoch'][at]:.3g} | "
            f"{run['step'][at]:,} | {rates[at]:.3g} of {max(rates):.3g} | "
            f"{run['epoch'][rise(run)]:.3g} | {values[most]:.3g}, {run['epoch'][most]:.3g} | "
            f"{values[0]:.3g} | {run['epoch'][-1]:.3g} |"
        )
    return "\n".join(lines) + "\n"


def picture(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Plots every curve against epochs and against updates, with its peak marked."""
    figure = style.figure(11, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    for number, run in enumerate(found):
        look, at, medians = style.numbered(number), peak(run), smooth(run["lipschitz"])
        for axes, place in zip(panels, ("epoch", "step"), strict=True):
            axes.plot(run[place], run["lipschitz"], color=look["color"], linewidth=0.8, alpha=0.4)
            axes.plot(
                run[place],
                medians,
                color=look["color"],
                linewidth=1.4,
                label=f"{run['batch']:,}" if place == "epoch" else None,
            )
            axes.plot(
                run[place][at],
                medians[at],
                color=look["color"],
                marker=look["marker"],
                markersize=8,
                linestyle="none",
            )
            axes.axvline(run[place][at], color=look["color"], linestyle=":", linewidth=0.8)
    style.dress(panels[0], "by epochs", "epochs", "local Lipschitz estimate |g'Hg| / |g|²")
    style.dress(panels[1], "by updates", "completed updates", "")
    for axes in panels:
        axes.set_xscale("log")
        style.log_axis(axes)
        axes.xaxis.set_major_formatter("{x:,g}")
    figure.legend(
        loc="outside lower center",
        ncols=len(found),
        frameon=False,
        title=f"batch; bold: medians of {WINDOW} estimates, with their peak",
    )
    return figure


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns the Markdown page of the record."""
    first = found[0]
    made_by = sorted(set(map(machine, found)))
    return f"""# The local Lipschitz estimate along training

Curvature of the training loss along its gradient, L = |g'Hg| / |g|², over the same {first["rows"]}
training examples in every run: `{first["model"]}` on {first["data"]}, {first["optimizer"]}, rates
and warm-ups by LEGW. The LEGW paper says that the peak comes later in epochs at a larger batch
(recalled). Single estimates jump, so the peak is that of the median of {WINDOW} records; a later
one can be as high as the first, which the epoch where half of it is first reached does not feel.
One run of each batch, seed {first["seed"]}, as long as the last column says: a longer one may have
a later peak. That the peak is of medians was decided after the single estimates had been seen; they
are in the table too. Made by: {"; ".join(made_by)}.

![The estimate against epochs and updates, a curve for each batch](lipschitz.svg)

{table(found)}
Commands, with the `--config.accumulation_steps` and `--config.duration` that a run needs:
`python -m lamb_tpu.train --config=configs/mnist_lstm.py:batch=N --workdir=runs/N
--config.log.lipschitz_rows={first["rows"]} --config.log.every='0.1 epochs'`, then `python -m
experiments.legw.lipschitz runs/* --write`. Curves: lipschitz.json.
"""


def main(options: argparse.Namespace) -> None:
    """Prints the table and draws the picture; with --write also writes the page and the record."""
    output = RECORD.with_suffix(".svg") if options.write else options.output
    path = buckets.local(output, "--output")
    style.check_picture(path, "--output", ".svg")
    if options.runs:
        found = sorted((read(run) for run in options.runs), key=lambda run: run["batch"])
    else:
        found = json.loads(RECORD.read_text())
    with writing.checked(path, "--output"):
        writing.write(path, style.svg(picture(found)).encode())
        if options.write:
            lines = ",\n".join(json.dumps(run) for run in found)
            writing.write(RECORD, f"[\n{lines}\n]\n".encode())
            writing.write(RECORD.with_suffix(".md"), page(found).encode())
    print(f"{table(found)}\n{path}")


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
        help="the picture (default: %(default)s)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write record, picture and page beside this file instead",
    )
    return parser.parse_all(arguments)


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # the flags of absl, of which there are none here
    cli.run_main(lambda: main(_parse(given)))
