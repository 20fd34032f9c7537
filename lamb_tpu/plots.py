"""Plots a run: loss, metrics, learning rate, gradient norm, and each layer's trust ratio.

  python -m lamb_tpu.plots --workdir=DIR

The figure curves.png shows the quantities in metrics.jsonl against updates. If the run was trained
with --config.optimizer.collect=True, a second figure, layers.png, shows trust ratios and relative
step lengths of the adaptive layers, from the network's first layer to its last. Both figures
are written into the workdir; --out=FILE.png writes FILE.png and FILE_layers.png.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    flags.DEFINE_string("workdir", None, "Folder of the run, or of one of its phases.")
    flags.DEFINE_string("out", None, "PNG file for the curves; default: curves.png in the workdir.")
    cli.answer_help()

import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style, terminal
from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading, writing
from lamb_tpu.store import runs
from lamb_tpu.store.runs import RunFiles

# With more layers than this, the figure does not grow, and only every n-th row is labelled.
_MAX_LABELS = 160
_ROW_INCHES = 0.14
# Recorded quantities that get a panel after the loss and the evaluation metrics, with their labels.
_TRAINED = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "batch_size": "batch size",
    "noise_scale": "noise scale (examples)",
}
_LOG = ("grad_norm", "noise_scale")
# Every run records these, so their absence is reported.
_EXPECTED = ("loss", "learning_rate", "grad_norm")

History = Sequence[tuple[int, Mapping[str, Any]]]
Records = Sequence[Mapping[str, Any]]


def curve_figure(trained: Records, evaluated: Records, title: str = "") -> Figure:
    """Plots every recorded quantity against updates; training and evaluation share a panel."""
    names = panels(trained, evaluated)
    if not names:
        raise ValueError("trained and evaluated have no numbers to plot; pass at least one record")
    columns = min(len(names), 2 if len(names) <= 4 else 3)
    rows = -(-len(names) // columns)
    figure = style.figure(4.6 * columns, 2.9 * rows + 0.4)
    if title:
        figure.suptitle(title, fontsize=12)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for name, axes in zip(names, grid):
        _draw(axes, name, trained, evaluated)
    drawn = [axes for axes in figure.axes if len(axes.lines) > 1]
    if drawn:  # no legend unless training and evaluation share a panel
        style.legend_below(figure, drawn)
    for axes in list(grid)[len(names) :]:
        axes.remove()
    return figure


def panels(trained: Records, evaluated: Records) -> list[str]:
    """Returns the quantities that have a panel, in the order of the panels."""
    recorded = _names(trained)
    metrics = [name for name in _names(evaluated) if name not in ("step", "kind", "epoch")]
    loss = ["loss"] if "loss" in recorded else []
    names = dict.fromkeys([*loss, *sorted(metrics, key=lambda name: name != "loss")])
    return [*names, *(name for name in _TRAINED if name in recorded and name not in names)]


def missing(trained: Records, evaluated: Records) -> list[str]:
    """Returns the names of the expected quantities that are not recorded."""
    names = panels(trained, evaluated)
    absent = [_TRAINED.get(name, name) for name in _EXPECTED if name not in names]
    return [*absent, *([] if evaluated else ["metrics of an evaluation"])]


def _names(records: Records) -> dict[str, None]:
    return dict.fromkeys(
        name
        for record in records
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    )


def _draw(axes: Axes, name: str, trained: Records, evaluated: Records) -> None:
    label = _TRAINED.get(name, name.replace("_", " "))
    for records, text, number in ((trained, "training", 0), (evaluated, "evaluation", 1)):
        points = [(each["step"], float(each[name])) for each in records if name in each]
        if not points:
            continue
        look = style.numbered(number)
        # Markers make a few points visible, but would hide a line through many.
        look["marker"] = look["marker"] if len(points) <= 30 else None
        axes.plot(*zip(*points), **look, linewidth=1.3, markersize=4, label=text)
    style.dress(axes, label, "updates", label)
    if name in _LOG:
        style.log_axis(axes)


def layer_figure(history: History, layers: Sequence[str] | None = None, title: str = "") -> Figure:
    """Plots trust ratios and relative step lengths of layers: lines above, heat maps below.

    The relative step length is the norm of the update divided by the norm of the weights; under LAMB
    without bounds, this length equals the learning rate in every adaptive layer. If there are more layers
    than `style.MOST`, lines go from dark (first layer) to bright (last layer). Grey: no value.

    Args:
      history: pairs (completed updates, `optim.diagnostics.scalars(opt_state)`), in time order.
      layers: layers to plot, from first to last, such as 'hidden0/kernel'; None: all layers of the
        first pair.
      title: title of the figure, with data, model and optimizer.

    Raises:
      ValueError: `history` is empty or has no diagnostics.
    """
    steps = [step for step, _ in history]
    names = history[0][1] if history else ()
    known = [name.removeprefix("ratios/") for name in names if name.startswith("ratios/")]
    layers = known if layers is None else list(layers)
    if not known or not layers:
        raise ValueError("history has no layer diagnostics; build the optimizer with collect=True")

    def rows(quantity: str) -> np.ndarray:
        return np.array(
            [[float(values[f"{quantity}/{layer}"]) for _, values in history] for layer in layers]
        )

    ratios, lengths = rows("ratios"), rows("weight_norms")
    # A layer of zeros has no relative step length; NaN is left out of the plots.
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(lengths > 0, rows("update_norms") / lengths, np.nan)
    labels = style.layer_names(layers)
    map_height = 0.9 + max(1.2, _ROW_INCHES * min(len(layers), _MAX_LABELS))
    figure = style.figure(12, 3.6 + map_height)
    if title:
        figure.suptitle(title, fontsize=12)
    (top_left, top_right), (left, right) = figure.subplots(
        2, 2, sharex=True, height_ratios=(3.0, map_height)
    )
    quantities = {"trust ratio": ratios, "update norm / weight norm": relative}
    for axes, (name, values) in zip((top_left, top_right), quantities.items()):
        _lines(axes, name, steps, values, labels)
    if len(layers) > style.MOST:
        top_left.set_title("trust ratio, dark to bright: first to last layer", fontsize=11)
    style.legend_below(figure, [top_left])
    for axes, (name, values) in zip((left, right), quantities.items()):
        style.heat_map(axes, name, steps, values)
    stride = -(-len(layers) // _MAX_LABELS)
    # Row n of the map extends from n to n + 1; its label is in the middle.
    left.set_yticks(np.arange(0, len(layers), stride) + 0.5, labels[::stride], fontsize=7)
    right.set_yticks([])
    return figure


def _positive(values: np.ndarray) -> np.ma.MaskedArray:
    # Both plots have logarithmic scales, which show only positive values.
    return np.ma.masked_where(~(values > 0), values)


def _lines(
    axes: Axes, name: str, steps: Sequence[int], values: np.ndarray, labels: Sequence[str]
) -> None:
    are_few = len(values) <= style.MOST  # more lines would look alike
    # Leave out the bright end of the colour map, which is hard to see on white.
    colors = matplotlib.colormaps[style.SEQUENCE](np.linspace(0, 0.92, len(values)))
    named = range(len(values)) if are_few else (0, len(values) - 1)
    for row, (color, line) in enumerate(zip(colors, _positive(values), strict=True)):
        # A line through a single point is invisible without a marker.
        look = (
            style.sparse(style.numbered(row), len(steps), row)
            if are_few
            else {"color": color, "marker": "o" if len(steps) == 1 else None}
        )
        axes.plot(
            steps, line, **look, linewidth=1.2, label=labels[row] if row in named else None,
        )  # fmt: skip
    if not are_few:
        with np.errstate(all="ignore"):
            middle = np.ma.median(_positive(values), axis=0)
        axes.plot(steps, middle, color="k", linewidth=2, label=f"median of {len(values)} layers")
    style.dress(axes, name, "", name)
    style.log_axis(axes)


def _adapting(layers: Sequence[str], table: str) -> list[str]:
    """Returns the adaptive layers according to `table`, the content of a run's parameters.txt."""
    # Column 5 is 'adapt'. The last line, with the totals, has fewer columns.
    adapting = {
        columns[0]
        for columns in (re.split(r" {2,}", row) for row in table.splitlines()[1:])
        if len(columns) > 5 and columns[5] == "yes"
    }
    # A stacked parameter has one row in the table, but a name for each layer, such as kernel[3].
    return [layer for layer in layers if re.sub(r"\[[\d,]+\]$", "", layer) in adapting]


def _of_run(run: RunFiles, history: History) -> Figure | None:
    """Returns the figure of a run's adaptive layers; None if there are none."""
    names = [name for name in history[0][1] if name.startswith("ratios/")]
    path = run.folder.parameters
    try:
        table = reading.read_text(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "restore the file from a copy of the run") from None
    layers = _adapting([name.removeprefix("ratios/") for name in names], table)
    if not layers:
        return None
    return layer_figure(history, layers, f"{_title(run)}: the {len(layers)} adaptive layers")


def _title(run: RunFiles) -> str:
    """Describes the model, data, optimizer and batch size of a run."""
    config, optimizer = run.config, run.config["optimizer.name"]
    look = style.OPTIMIZERS.get(optimizer)
    return (
        f"{config['model.name']} on {config['data.name']}, {look.name if look else optimizer}, "
        f"batch {config['batch_size']:,}"
    )


def main() -> None:
    """Writes the figures of the run in --workdir."""
    run = runs.read(flags.FLAGS.workdir)
    path, layers_path = (run.folder.path / name for name in ("curves.png", "layers.png"))
    if flags.FLAGS.out:
        path = style.figure_path(flags.FLAGS.out, "--out")
        layers_path = path.with_name(f"{path.stem}_layers.png")
    trained, evaluated, layers = map(run.records, ("train", "eval", "layers"))
    if not trained and not evaluated:
        remedy = "wait for the first record, which the run writes after config.log.every"
        raise UserError(run.metrics, problem="has no records yet", remedy=remedy)
    try:
        _save(curve_figure(trained, evaluated, _title(run)), path)
        for name in missing(trained, evaluated):
            print(f"not recorded, so not drawn: {name}")
        if layers:
            figure = _of_run(run, [(record["step"], record) for record in layers])
    except (KeyError, TypeError, ValueError) as error:
        problem = f"has damaged records ({type(error).__name__}: {error})"
        remedy = "restore the file from a copy of the run"
        raise UserError(run.metrics, problem=problem, remedy=remedy) from None
    if not layers:
        print(
            terminal.fit(
                "not recorded, so not drawn: trust ratios; to record them, train with "
                "--config.optimizer.collect=True in a new --workdir"
            )
        )
    elif figure is None:
        print(
            terminal.fit(
                f"not drawn: trust ratios, because no layer in {run.folder.parameters} is adaptive; "
                "give the optimizer other rules, and train in a new --workdir"
            )
        )
    else:
        _save(figure, layers_path)


def _save(figure: Figure, path: Any) -> None:
    writing.replace(path, style.png(figure), "--out")
    print(path)


if __name__ == "__main__":
    cli.run_main(main, required=("workdir",))
