"""Plots each layer's trust ratios and relative step lengths over a run.

  python -m lamb_tpu.plots --workdir=DIR

The run must have been trained with --config.optimizer.collect=True; metrics.jsonl then holds
records of the kind 'layers'. The picture layers.png, in the workdir or at --out, shows the layers
that adapt, from the network's first to its last.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    flags.DEFINE_string("workdir", None, "Folder of the run, or of one phase of several.")
    flags.DEFINE_string("out", None, "The picture; default layers.png in the workdir.")
    cli.answer_help()

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading, writing
from lamb_tpu.store import runs
from lamb_tpu.store.runs import RunFiles

# With more layers the figure grows no taller, and only every n-th row has its name.
_MAX_LABELS = 160
_NAMED_LINES = 10  # beyond, a legend of every line would hide them
_ROW_INCHES = 0.14

History = Sequence[tuple[int, Mapping[str, Any]]]


def layer_figure(history: History, layers: Sequence[str] | None = None, title: str = "") -> Figure:
    """Plots two quantities of each layer over training: lines above, a heat map below.

    Left: trust ratios. Right: the norm of the update divided by the norm of the weights, which says
    how far the layer turns. LAMB without bounds makes it the learning rate for every layer that
    adapts. Lines go from dark to bright with the layer's place in the network. A heat map has a row
    for each layer and a column for each reading; it is grey where there is no ratio.

    Args:
      history: pairs (completed updates, `optim.readings.scalars(opt_state)`), in the order of time.
      layers: layers to plot, from first to last, such as 'hidden0/kernel'; None: all layers of the
        first pair.
      title: title of the figure, with data, model and optimizer.

    Raises:
      ValueError: `history` is empty or has no readings.
    """
    steps = [step for step, _ in history]
    names = history[0][1] if history else ()
    known = [name.removeprefix("ratios/") for name in names if name.startswith("ratios/")]
    layers = known if layers is None else list(layers)
    if not known or not layers:
        raise ValueError("there are no readings; build the optimizer with collect=True")

    def rows(quantity: str) -> np.ndarray:
        return np.array(
            [[float(values[f"{quantity}/{layer}"]) for _, values in history] for layer in layers]
        )

    ratios, lengths = rows("ratios"), rows("weight_norms")
    # A layer of zeros has no relative step length: NaN, which is left out of the plots.
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = np.where(lengths > 0, rows("update_norms") / lengths, np.nan)
    labels = _labels(layers)
    map_height = 0.9 + max(1.2, _ROW_INCHES * min(len(layers), _MAX_LABELS))
    figure = style.figure(12, 3.6 + map_height)
    if title:
        figure.suptitle(title, fontsize=12)
    (top_left, top_right), (left, right) = figure.subplots(
        2, 2, sharex=True, height_ratios=(3.0, map_height)
    )
    for axes, name, values in (
        (top_left, "trust ratio", ratios),
        (top_right, "update norm / weight norm", turns),
    ):
        _lines(axes, name, steps, values, labels)
    top_left.set_title("trust ratio, dark to bright: first to last layer", fontsize=11)
    top_left.legend(fontsize=7, loc="best")
    for axes, name, values in (
        (left, "trust ratio", ratios),
        (right, "update norm / weight norm", turns),
    ):
        style.heat_map(axes, name, steps, values)
    stride = -(-len(layers) // _MAX_LABELS)
    # Row n of the map extends from n to n + 1; its name stands in the middle.
    left.set_yticks(np.arange(0, len(layers), stride) + 0.5, labels[::stride], fontsize=7)
    right.set_yticks([])
    return figure


def _labels(layers: Sequence[str]) -> list[str]:
    """Returns paths without the ending that nearly all share, such as '/kernel'."""
    short = [re.sub(r"/(kernel|w|weight)(/value)?(?=\[|$)", "", layer) for layer in layers]
    return short if len(set(short)) == len(layers) else list(layers)


def _positive(values: np.ndarray) -> np.ma.MaskedArray:
    # Both plots have logarithmic scales, on which only positive values have a place.
    return np.ma.masked_where(~(values > 0), values)


def _lines(
    axes: Axes, name: str, steps: Sequence[int], values: np.ndarray, labels: Sequence[str]
) -> None:
    # The bright end of the colour map would be hard to see on white.
    colors = matplotlib.colormaps[style.SEQUENCE](np.linspace(0, 0.92, len(values)))
    named = range(len(values)) if len(values) <= _NAMED_LINES else (0, len(values) - 1)
    for row, (color, line) in enumerate(zip(colors, _positive(values), strict=True)):
        # A line through a single point is invisible without a marker.
        axes.plot(
            steps, line, color=color, linewidth=1.2, label=labels[row] if row in named else None,
            marker="o" if len(steps) == 1 else None,
        )  # fmt: skip
    if len(values) > _NAMED_LINES:
        with np.errstate(all="ignore"):
            middle = np.ma.median(_positive(values), axis=0)
        axes.plot(steps, middle, color="k", linewidth=2, label=f"median of {len(values)} layers")
    style.dress(axes, name, "", name)
    style.log_axis(axes)


def _adapting(layers: Sequence[str], table: str) -> list[str]:
    """Returns the layers that adapt according to a run's table, see `parameters.table`."""
    # The column of index 5 is 'adapt'. The last line, with the totals, has fewer columns.
    adapting = {
        columns[0]
        for columns in (re.split(r" {2,}", row) for row in table.splitlines()[1:])
        if len(columns) > 5 and columns[5] == "yes"
    }
    # A stacked parameter has one row in the table and a reading for each layer: kernel[3].
    return [layer for layer in layers if re.sub(r"\[[\d,]+\]$", "", layer) in adapting]


def _of_run(run: RunFiles, history: History) -> Figure:
    """Returns the figure of a run's layers that adapt; the title has model and data."""
    names = [name for name in history[0][1] if name.startswith("ratios/")]
    path = run.folder.parameters
    try:
        table = reading.read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason})") from None
    layers = _adapting([name.removeprefix("ratios/") for name in names], table)
    if not layers:
        raise UserError(
            f"--workdir {run.folder.path} has no layer that adapts: {path.name} says 'no' for "
            "each; give the optimizer other rules and train in a new --workdir"
        )
    config = run.config
    optimizer = config["optimizer.name"]
    look = style.OPTIMIZERS.get(optimizer)
    return layer_figure(
        history,
        layers,
        f"{config['model.name']} on {config['data.name']}, {look.name if look else optimizer}, "
        f"batch {config['batch_size']:,}: the {len(layers)} layers that adapt",
    )


def main() -> None:
    """Entry point of the command line."""
    run = runs.read(flags.FLAGS.workdir)
    records = run.records("layers")
    if not records:
        raise UserError(
            f"{run.metrics} has no records of layers; train with "
            "--config.optimizer.collect=True in a new --workdir"
        )
    path = run.folder.path / "layers.png"
    if flags.FLAGS.out:
        path = buckets.local(flags.FLAGS.out, "--out")
        style.check_picture(path, "--out")
    try:
        figure = _of_run(run, [(record["step"], record) for record in records])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.metrics} has records of layers that are not whole "
            f"({type(error).__name__}: {error})"
        ) from None
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with writing.checked(path, "--out"):
        writing.write(path, picture.getvalue())
    print(path)


if __name__ == "__main__":
    cli.run_main(main, required=("workdir",))
