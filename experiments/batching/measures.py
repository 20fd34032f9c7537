"""Draws three measures of the batch over one run: noise scale, cosine of halves, critical batch.

  python -m experiments.batching.measures --workdir=runs/measures --write

A small BERT is trained on the text that comes with Python, so nothing is downloaded. The run
records the noise scale and SimiGrad's cosine of two half gradients. From its checkpoints branches
at several batches then measure the critical batch. That takes about 20 minutes on two cores. A
command that was broken off goes on where it stopped.

With --write the record, the picture and the page beside this file are made from the run; without
--workdir they are made again from the record.
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
from lamb_tpu.critical_batch.choices import Request
from lamb_tpu.critical_batch.measuring import Outcome, measure
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.reproduce.jobs import Stage
from lamb_tpu.reproduce.results import machine
from lamb_tpu.store import runs
from lamb_tpu.train import train

RECORD = pathlib.Path(__file__).with_suffix(".json")
WINDOW = 9  # records in a mean of cosines
RECIPE = "bert_pretrain:smoke,phase=1"


class Scale(NamedTuple):
    """The keys that the run changes, and the branches from it."""

    overrides: Mapping[str, Any]
    request: Request


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
        Request(
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
        Request("5, 15 steps", factors="1,2", span="8 steps", split="train", metric="mlm_loss"),
    ),
}


def make(workdir: str, scale: str) -> dict[str, Any]:
    """Trains the run and its branches as far as they are missing, and returns their record.

    Args:
      workdir: folder of the run.
      scale: one of `SCALES`.

    Raises:
      UserError: the folder has another run.
    """
    overrides, request = SCALES[scale]
    train(Stage(RECIPE, overrides).config(), workdir, quiet=True)
    return record(workdir, measure(None, workdir, request))


def record(workdir: str, outcome: Outcome) -> dict[str, Any]:
    """Returns what the page tells of a run and its branches."""
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
        # JSON has no infinity: such a noise scale is text there.
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
    """Returns five digits of a number; None for one that is not finite."""
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Returns the mean of each value and its neighbours, `WINDOW` together, fewer at the ends."""
    half, means = WINDOW // 2, list[float | None]()
    for place in range(len(values)):
        near = [x for x in values[max(0, place - half) : place + half + 1] if x is not None]
        means.append(statistics.fmean(near) if near else None)
    return means


def implied(cosine: float | None, batch: int) -> float | None:
    r"""Returns the noise scale that a cosine of two half gradients says, in examples.

    Halves of b examples with a gradient g and noise of the trace S have a cosine of about
    :math:`|g|^2 / (|g|^2 + S / b)`, so that :math:`S / |g|^2 = b (1 / cos - 1)`. None where the
    cosine is missing or not above 0.

    >>> implied(0.5, 32)
    16.0
    """
    return None if cosine is None or cosine <= 0 else batch / 2 * (1 / cosine - 1)


def table(found: Mapping[str, Any]) -> str:
    """Returns the measures at each place as Markdown."""
    batch, means = found["batch"], smooth(found["cosine"])
    larger = [factor * batch for factor in found["factors"][1:]]
    lines = [
        "| update | critical batch | crossing | noise scale | cosine | noise scale by the cosine |"
        + "".join(f" excess at {size:,}, % |" for size in larger),
        "|" + "--:|" * (6 + len(larger)),
    ]
    for place in found["places"]:
        steps = found["step"]
        near = min(range(len(steps)), key=lambda index: abs(steps[index] - place["step"]))
        cosine, noise = means[near], found["noise_scale"][near]
        cells = [
            f"{place['step']:,}",
            f"{place['critical']:,}{'' if place['beyond'] else ' or more'}",
            _shown(place["crossing"], ",.0f") if place["beyond"] else "",
            _shown(noise, ",.0f"),
            _shown(cosine, ".3f"),
            _shown(implied(cosine, batch), ",.0f"),
        ]
        for mean, error in zip(place["excess"][1:], place["error"][1:], strict=True):
            width = "" if error is None else f" ± {100 * error:.1f}"
            cells.append("diverged" if mean is None else f"{100 * mean:+.1f}{width}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def picture(found: Mapping[str, Any]) -> Figure:
    """Plots the batches that the measures say over training, and below them the cosine."""
    figure = style.figure(8.5, 6.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps, means, batch = found["step"], smooth(found["cosine"]), found["batch"]
    critical, noise, cosine = style.OPTIMIZERS["lamb"].color, style.COLORS[2], style.COLORS[1]
    upper.plot(steps, _gaps(found["noise_scale"]), color=noise, linewidth=1.2, label="noise scale")
    upper.plot(
        steps,
        _gaps([implied(mean, batch) for mean in means]),
        color=cosine,
        linewidth=1.2,
        label="noise scale by the mean cosine",
    )
    places = [place for place in found["places"] if place["crossing"] is not None]
    upper.plot(
        [place["step"] for place in places],
        [place["crossing"] for place in places],
        marker="o",
        color=critical,
        label="critical batch, by branches",
    )
    least = [place for place in places if not place["beyond"]]
    if least:
        upper.plot(
            [place["step"] for place in least],
            [place["crossing"] for place in least],
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
    upper.legend(fontsize=8)
    lower.plot(steps, _gaps(found["cosine"]), color=cosine, linewidth=0.8, alpha=0.4)
    lower.plot(steps, _gaps(means), color=cosine, linewidth=1.4)
    lower.axhline(0, color=style.NEUTRAL, linestyle="--", linewidth=1)
    style.dress(lower, "", "completed updates", "cosine of two halves")
    lower.set_xlim(left=0)
    return figure


def _gaps(values: Sequence[float | None]) -> list[float]:
    """A line has a gap where there is no value, or none that a logarithm has."""
    return [math.nan if value is None else value for value in values]


def page(found: Mapping[str, Any]) -> str:
    """Returns the Markdown page of the record."""
    made_by = machine(found)
    return f"""# Noise scale, SimiGrad's cosine and the critical batch over one run

A BERT of two layers on the text that comes with Python, LAMB, {found["updates"]:,} updates of
{found["batch"]} examples, of which an epoch has {found["examples"]:,}. The critical batch is the
largest at which branches of {found["span"]:,} examples, {found["seeds"]} seeds each, end at most
{100 * found["tolerance"]:g} % above the loss of the run's own batch ({found["metric"]} on
{found["split"]}); their rate follows the batch by the rule '{found["scaling"]}'. The noise scale is
the ratio of averages over updates with a decay of {found["decay"]}. The cosine is of the gradients
of two halves of a batch, the mean of {WINDOW} records; with halves of b examples it says a noise
scale of b (1 / cosine - 1). One run, seed 0. Made by: {made_by}.

![The three measures over training](measures.svg)

{table(found)}
Command: `python -m experiments.batching.measures --workdir=runs/measures --write`. Curves:
measures.json.
"""


def main(options: argparse.Namespace) -> None:
    """Prints the table and draws the picture; with --write also writes the page and the record."""
    if options.write and options.scale != "small":
        raise UserError(f"--write keeps a run of --scale=small, not of {options.scale!r}")
    output = RECORD.with_suffix(".svg") if options.write else options.output
    path = buckets.local(output, "--output")
    style.check_picture(path, "--output", ".svg")
    if options.workdir:
        found = make(options.workdir, options.scale)
    elif RECORD.exists():
        found = json.loads(RECORD.read_text())
    else:
        raise UserError(f"--workdir is missing, and there is no record {RECORD} yet")
    with writing.checked(path, "--output"):
        writing.write(path, style.svg(picture(found)).encode())
        if options.write:
            writing.write(RECORD, (json.dumps(found, indent=1) + "\n").encode())
            writing.write(RECORD.with_suffix(".md"), page(found).encode())
    print(f"{table(found)}\n{path}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m experiments.batching.measures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder of the run, made where missing")
    parser.add_argument(
        "--scale",
        default="small",
        choices=tuple(SCALES),
        help="size of the run (default: %(default)s); smoke tries out the command",
    )
    parser.add_argument(
        "--output",
        default="measures.svg",
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
