"""Plots three measures over a run: noise scale, cosine of half-batch gradients, critical batch.

  python -m experiments.batching.measures --workdir=runs/measures --write

The run trains a small BERT on the text that comes with Python, so nothing is downloaded. It records
the noise scale and SimiGrad's cosine between the gradients of two half batches. Then branches at
several batch sizes, which start from the run's checkpoints, measure the critical batch. In total, this
takes about 20 minutes on two cores. An interrupted command resumes if it is started again.

With --write, the command also writes the record, the figure and the page beside this file. Without
--workdir, the figure and the page are made from the committed record.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lamb_tpu import cli, style, terminal
from lamb_tpu.critical_batch.choices import StudyRequest
from lamb_tpu.critical_batch.measuring import Outcome, measure
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.reproduce.jobs import JobStage
from lamb_tpu.reproduce.results import machine
from lamb_tpu.store import runs
from lamb_tpu.train import train

RECORD = pathlib.Path(__file__).with_suffix(".json")
WINDOW = 9  # records in a mean of cosines
RECIPE = "bert_pretrain:smoke,phase=1"


class Scale(NamedTuple):
    """The run's changes to the config, and the settings of its branches."""

    overrides: Mapping[str, Any]
    request: StudyRequest


_OVERRIDES = {
    "batch_size": 32,
    "accumulation_steps": 4,
    "parallel.backend": "jit",
    "statistics.noise_scale": True,
    "statistics.halves": True,
    "statistics.decay": 0.95,
    "eval.every": "25 percent",
    "log.tensorboard": False,
}
SCALES = {
    "small": Scale(
        {
            **_OVERRIDES,
            "duration": "2000 steps",
            "log.every": "10 steps",
            "checkpoint.keep_every": "5 percent",
        },
        StudyRequest(
            "5, 20, 50, 85 percent",
            factors="1,2,4,8",
            span="8 percent",
            tolerance=0.02,
            seeds=2,
            split="train",
            metric="mlm_loss",
            scaling="sqrt",
        ),
    ),
    "smoke": Scale(
        {
            **_OVERRIDES,
            "duration": "24 steps",
            "log.every": "2 steps",
            "checkpoint.keep_every": "5 steps",
        },
        StudyRequest(
            "5, 15 steps", factors="1,2", span="8 steps", split="train", metric="mlm_loss"
        ),
    ),
}


def make(workdir: str, scale: str) -> dict[str, Any]:
    """Trains what is missing of the run and its branches, and returns the record of the measures.

    Args:
      workdir: folder of the run.
      scale: one of `SCALES`.

    Raises:
      UserError: the folder holds a different run.
    """
    overrides, request = SCALES[scale]
    train(JobStage(RECIPE, overrides).config(), workdir, quiet=True)
    return record(workdir, measure(None, workdir, request))


def record(workdir: str, outcome: Outcome) -> dict[str, Any]:
    """Returns the page's data about a run and its branches."""
    run, study = runs.read(workdir), outcome.study
    trained = [each for each in run.records("train") if "noise_scale" in each]
    receipt, recipe = run.receipt(), outcome.run.recipe
    return {
        **{
            name: receipt.get(name)
            for name in ("commit", "jax", "device", "devices", "cores", "processor")
        },
        "batch": recipe.batch_size,
        "updates": recipe.total_steps,
        "examples": recipe.num_examples,
        "tolerance": outcome.tolerance,
        "factors": list(study.factors),
        "span": study.at[-1] * recipe.batch_size,
        "seeds": len(study.seeds),
        "scaling": study.scaling,
        "split": study.split,
        "metric": study.metric,
        "decay": run.config["statistics.decay"],
        "step": [each["step"] for each in trained],
        # The metrics file stores an infinite noise scale as text, because JSON has no infinity.
        "noise_scale": [_number(each["noise_scale"]) for each in trained],
        "cosine": [_number(each["similarity"]) for each in trained],
        "places": [
            {
                "step": row.step,
                "critical": row.critical.batch,
                "beyond": row.critical.beyond,
                "crossing": _number(row.critical.crossing),
                "excess": [_number(each.mean) for each in row.excesses],
                "error": [_number(each.error) for each in row.excesses],
            }
            for row in outcome.rows
        ],
    }


def _number(value: float | str) -> float | None:
    """Rounds a number to five significant digits; returns None if it is not finite."""
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Returns moving means of `WINDOW` values, or of fewer values at the ends."""
    half, means = WINDOW // 2, list[float | None]()
    for position in range(len(values)):
        near = [x for x in values[max(0, position - half) : position + half + 1] if x is not None]
        means.append(statistics.fmean(near) if near else None)
    return means


def implied(cosine: float | None, batch: int) -> float | None:
    r"""Returns the noise scale, in examples, that the cosine of two half-batch gradients implies.

    Halves of b examples, with a gradient g and noise of trace S, have a cosine of about
    :math:`|g|^2 / (|g|^2 + S / b)`, so that :math:`S / |g|^2 = b (1 / cos - 1)`. Returns None if the
    cosine is missing or not above 0.

    >>> implied(0.5, 32)
    16.0
    """
    return None if cosine is None or cosine <= 0 else batch / 2 * (1 / cosine - 1)


def table(study: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the measures at each recorded update."""
    batch, means = study["batch"], smooth(study["cosine"])
    larger = [factor * batch for factor in study["factors"][1:]]
    lines = [
        "| update | critical batch | crossing | noise scale | cosine | noise scale from the cosine |"
        + "".join(f" excess at {size:,}, % |" for size in larger),
        "|" + "--:|" * (6 + len(larger)),
    ]
    for position in study["places"]:
        steps = study["step"]
        near = min(range(len(steps)), key=lambda index: abs(steps[index] - position["step"]))
        cosine, noise = means[near], study["noise_scale"][near]
        cells = [
            f"{position['step']:,}",
            f"{position['critical']:,}{'' if position['beyond'] else ' or more'}",
            _shown(position["crossing"], ",.0f") if position["beyond"] else "",
            _shown(noise, ",.0f"),
            _shown(cosine, ".3f"),
            _shown(implied(cosine, batch), ",.0f"),
        ]
        for mean, error in zip(position["excess"][1:], position["error"][1:], strict=True):
            width = "" if error is None else f" ± {100 * error:.1f}"
            cells.append("diverged" if mean is None else f"{100 * mean:+.1f}{width}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def draw(study: Mapping[str, Any]) -> Figure:
    """Plots the batch sizes that the three measures imply, and in a lower panel the cosine."""
    figure = style.figure(style.WIDTH, 6.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps, means, batch = study["step"], smooth(study["cosine"]), study["batch"]
    critical, noise, cosine = style.COLORS[0], style.COLORS[2], style.COLORS[1]
    upper.plot(steps, _gaps(study["noise_scale"]), color=noise, linewidth=1.2, label="noise scale")
    upper.plot(
        steps,
        _gaps([implied(mean, batch) for mean in means]),
        color=cosine,
        linewidth=1.2,
        linestyle="-.",
        label="noise scale by the mean cosine",
    )
    positions = [position for position in study["places"] if position["crossing"] is not None]
    upper.plot(
        [position["step"] for position in positions],
        [position["crossing"] for position in positions],
        marker="o",
        color=critical,
        label="critical batch, by branches",
    )
    least = [position for position in positions if not position["beyond"]]
    if least:
        upper.plot(
            [position["step"] for position in least],
            [position["crossing"] for position in least],
            marker="^",
            markersize=10,
            linestyle="none",
            color=critical,
            label="or more: no batch was beyond the tolerance",
        )
    upper.axhline(batch, color=style.NEUTRAL, linestyle="--", linewidth=1, label="batch of the run")
    upper.set_yscale("log", base=2)
    style.dress(upper, "noise scale, cosine and critical batch over a run", "", "batch (examples)")
    upper.yaxis.set_major_formatter("{x:,g}")
    style.legend_below(figure, [upper])
    lower.plot(steps, _gaps(study["cosine"]), color=cosine, linewidth=0.8, alpha=0.4)
    lower.plot(steps, _gaps(means), color=cosine, linewidth=1.4)
    lower.axhline(0, color=style.NEUTRAL, linestyle="--", linewidth=1)
    style.dress(lower, "", "completed updates", "cosine of two halves")
    lower.set_xlim(left=0)
    return figure


def _gaps(values: Sequence[float | None]) -> list[float]:
    """Replaces missing values by NaN, so that the line has a gap."""
    return [math.nan if value is None else value for value in values]


def page(study: Mapping[str, Any]) -> str:
    """Returns the Markdown page of the record."""
    made_by = machine(study)
    return f"""# Noise scale, SimiGrad's cosine and the critical batch over one run

A two-layer BERT is trained with LAMB on the text that comes with Python, for {study["updates"]:,} updates
of {study["batch"]} examples; an epoch has {study["examples"]:,} examples. To measure the critical batch at
a listed update, branches of {study["span"]:,} examples, {study["seeds"]} seeds each, continue the run at
several batch sizes. The critical batch is the largest batch size up to which the loss of the branches
({study["metric"]} on {study["split"]}) is at most
{100 * study["tolerance"]:g} % above the loss at the run's batch. The rule '{study["scaling"]}' scales the
learning rate of a branch. The noise scale is a ratio of two
exponential moving averages over updates, with a decay of {study["decay"]}. The cosine between the
gradients of a batch's two halves is averaged over {WINDOW} records. With halves of b examples, it implies a
noise scale of b (1 / cosine - 1) examples. `crossing` is the batch size, interpolated, at which the loss
exceeds the tolerance; `excess` is how far the loss at a batch is above the loss at the run's batch, with the
standard error over the seeds. There is one run, with seed 0. Made
by: {made_by}.

![The three measures over training](measures.svg)

{table(study)}
Command: `python -m experiments.batching.measures --workdir=runs/measures --write`. Curves:
measures.json.
"""


def main(options: argparse.Namespace) -> None:
    """Prints the table and draws the figure; with --write also writes the page and the record."""
    if options.write and options.scale != "small":
        raise UserError("--scale", options.scale, "conflicts with --write", "use small")
    output = RECORD.with_suffix(".svg") if options.write else options.output
    path = style.figure_path(output, "--output", ".svg")
    if options.workdir:
        study = make(options.workdir, options.scale)
    elif RECORD.exists():
        study = json.loads(RECORD.read_text())
    else:
        problem = f"is missing, and there is no record {RECORD} yet"
        raise UserError("--workdir", problem=problem, remedy="give a folder for the run")
    writing.replace(path, style.svg(draw(study)), "--output")
    if options.write:
        writing.replace(RECORD, json.dumps(study, indent=1) + "\n", "--write")
        writing.replace(RECORD.with_suffix(".md"), page(study), "--write")
    print(f"{table(study)}\n{path}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m experiments.batching.measures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder of the run; created if missing")
    parser.add_argument(
        "--scale",
        default="small",
        choices=tuple(SCALES),
        help="size of the run (default: %(default)s); 'smoke' only tests the command",
    )
    parser.add_argument(
        "--output",
        default="measures.svg",
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
