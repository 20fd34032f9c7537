"""Draws what a run collected of its layers: trust ratios and the lengths of their steps.

  python -m lamb_tpu.plots --workdir=DIR

The run's config must have `collect=True` in its optimizer; metrics.jsonl then holds records of the
kind 'layers'. Writes layers.png into the workdir, or where --out says.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    flags.DEFINE_string("workdir", None, "Folder of the run, or of one phase of several.")
    flags.DEFINE_string("out", None, "The picture; default layers.png in the workdir.")
    cli.answer_help()

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from lamb_tpu import filesystem
from lamb_tpu.errors import UserError
from lamb_tpu.metrics import read_records

_MAX_LABELS = 60


def layer_figure(history: Sequence[tuple[int, Mapping[str, Any]]]) -> Figure:
    """Two heat maps, a row for each layer and a column for each update that was read.

    Left: trust ratios. Right: the norm of the update over the norm of the weights, which is how far
    the layer turns; LAMB without bounds makes it the learning rate for every layer that adapts.

    Args:
      history: pairs (completed updates, `optim.readings.scalars(opt_state)`), in the order of time.

    Raises:
      ValueError: no readings.
    """
    steps = [step for step, _ in history]
    names = history[0][1] if history else ()
    layers = [name.removeprefix("ratios/") for name in names if name.startswith("ratios/")]
    if not layers:
        raise ValueError("there are no readings; build the optimizer with collect=True")

    def rows(quantity: str) -> np.ndarray:
        return np.array([
            [float(values[f"{quantity}/{layer}"]) for _, values in history] for layer in layers
        ])

    ratios, lengths = rows("ratios"), rows("weight_norms")
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = np.where(lengths > 0, rows("update_norms") / lengths, np.nan)
    height = 1.6 + 0.2 * min(len(layers), _MAX_LABELS)
    figure = Figure(figsize=(11, max(3.2, height)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _heat_map(left, "trust ratio", steps, ratios)
    _heat_map(right, "update norm / weight norm", steps, turns)
    stride = -(-len(layers) // _MAX_LABELS)
    left.set_yticks(np.arange(0, len(layers), stride) + 0.5, layers[::stride], fontsize=8)
    left.set_ylim(len(layers), 0)
    return figure


def _heat_map(axes: Axes, title: str, steps: Sequence[int], values: np.ndarray) -> None:
    positive = values[np.isfinite(values) & (values > 0)]
    bounds = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    if bounds[0] == bounds[1]:  # a colour scale needs some width
        bounds = (bounds[0] / 2, bounds[1] * 2)
    # A column reaches from the reading before to its own.
    edges = [2 * steps[0] - steps[1] if len(steps) > 1 else steps[0] - 1, *steps]
    mesh = axes.pcolormesh(
        edges, np.arange(len(values) + 1), np.ma.masked_where(~(values > 0), values),
        norm=LogNorm(*bounds), cmap="viridis",
    )  # fmt: skip
    axes.set_facecolor("0.85")  # what is 0 or not a number
    axes.set_xlabel("completed updates")
    axes.set_title(title)
    axes.figure.colorbar(mesh, ax=axes)


def main() -> None:
    """Entry point of the command line."""
    workdir = pathlib.Path(flags.FLAGS.workdir)
    phases = sorted(path.parent.name for path in workdir.glob("*/metrics.jsonl"))
    if phases and not (workdir / "metrics.jsonl").exists():
        raise UserError(
            f"--workdir {workdir} holds the phases {', '.join(phases)}; give the folder of one of "
            "them"
        )
    records = read_records(workdir / "metrics.jsonl", "layers")
    if not records:
        raise UserError(
            f"{workdir / 'metrics.jsonl'} has no records of layers; set collect=True in the "
            "optimizer of the config file and train in a new --workdir"
        )
    path = pathlib.Path(flags.FLAGS.out or workdir / "layers.png")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UserError(f"--out {path} must be a .png file in a folder that exists")
    try:
        figure = layer_figure([(record["step"], record) for record in records])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{workdir / 'metrics.jsonl'} has records of layers that are not whole "
            f"({type(error).__name__}: {error})"
        ) from None
    with filesystem.writing("--out", path):
        figure.savefig(path)
    print(path)


if __name__ == "__main__":
    cli.run_main(main, required=("workdir",))
