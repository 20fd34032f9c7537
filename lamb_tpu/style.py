"""The common style of the project's plots: one colour for each optimizer, axes with units.

It imports Matplotlib, so only modules that draw import it.
"""

import io
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

from lamb_tpu.errors import UserError


class Look(NamedTuple):
    """An optimizer's name in plots and tables, its colour and its marker."""

    name: str
    color: str
    marker: str


# The first five are colours that people with any colour vision can tell apart (Okabe and Ito).
OPTIMIZERS = {
    "lamb": Look("LAMB", "#0072B2", "o"),
    "lars": Look("LARS", "#009E73", "D"),
    "adamw": Look("AdamW", "#D55E00", "s"),
    "momentum": Look("momentum", "#CC79A7", "^"),
    "rmsprop": Look("RMSProp", "#E69F00", "v"),
    "adam": Look("Adam", "#17BECF", "P"),
    "nesterov": Look("Nesterov", "#8C564B", "<"),
    "adagrad": Look("Adagrad", "#7F7F7F", "X"),
}
# For lines that are not optimizers: colours in order, and a neutral one.
COLORS = ("#333333", "#56B4E9", "#B8860B", "#8C6BB1")
NEUTRAL = "0.5"
# Colour map from the first layer of a network to its last, and from small values to large.
SEQUENCE = "viridis"
_MARKERS = "os^Dv<>ph*X"


def line(optimizer: str, variant: int = 0) -> dict[str, Any]:
    """Returns arguments of `Axes.plot` for an optimizer, one of `OPTIMIZERS`.

    Args:
      optimizer: the optimizer's name in configs.
      variant: 1 for a second line of the same optimizer, such as under another rule: dashed, with
        hollow markers.
    """
    look = OPTIMIZERS[optimizer]
    style: dict[str, Any] = {"color": look.color, "marker": look.marker}
    if variant:
        style |= {"linestyle": "--", "markerfacecolor": "white"}
    return style


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure of that many inches, laid out so that nothing overlaps."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def numbered(number: int) -> dict[str, Any]:
    """Returns arguments of `Axes.plot` for the lines of a plot whose lines are no optimizers.

    There are ten colours, which dashed and then dotted lines have again.
    """
    color = matplotlib.colormaps["tab10"](number % 10)
    return {
        "color": matplotlib.colors.to_hex(color),
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": ("-", "--", ":")[number // 10 % 3],
    }


def check_picture(path: pathlib.Path, flag: str, suffix: str = ".png") -> None:
    """Refuses a path that is no such file in a folder that exists; `flag` names it."""
    if path.suffix != suffix or not path.parent.is_dir():
        article = "an" if suffix == ".svg" else "a"
        raise UserError(f"{flag} {path} must be {article} {suffix} file in a folder that exists")


def dress(axes: Axes, title: str, x: str, y: str, better: str = "") -> None:
    """Gives axes their title and labels, a faint grid, and no box.

    Args:
      axes: the axes.
      title: title of the axes, with data and model if the figure's title has none.
      x, y: the quantities, each with its unit in parentheses, if it has one.
      better: 'lower' or 'higher'; '' if neither is better.
    """
    if better:
        # A unit in parentheses shares them with the note: 'time (s; lower is better)'.
        y = f"{y[:-1]}; {better} is better)" if y.endswith(")") else f"{y} ({better} is better)"
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """Makes the x axis a logarithmic axis of batch sizes with a tick at each."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()


def log_axis(axes: Axes) -> None:
    """Makes the y axis, whose lines are drawn, logarithmic.

    Ticks within two decades have plain numbers, such as 120, where Matplotlib has 1.2 x 10^2.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        few = high < 5 * low  # then 1, 2 and 5 in each decade are one tick or two
        axes.yaxis.set_major_locator(AutoLocator() if few else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def heat_map(axes: Axes, name: str, steps: Sequence[int], values: np.ndarray) -> None:
    """Plots a row for each layer, the first at the top, and a column for each reading.

    Args:
      axes: the axes; they receive a logarithmic colour bar.
      name: the quantity.
      steps: completed updates of the readings, ascending.
      values: (layers, readings); what is not positive is grey.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    bounds = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    if bounds[0] == bounds[1]:  # a colour scale needs some width
        bounds = (bounds[0] / 2, bounds[1] * 2)
    # A column extends from the previous reading to its own.
    edges = [max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else steps[0] - 1, *steps]
    # Thousands of cells as paths would make an SVG of megabytes.
    mesh = axes.pcolormesh(
        edges, np.arange(len(values) + 1), np.ma.masked_where(~(values > 0), values),
        norm=LogNorm(*bounds), rasterized=True,
        cmap=matplotlib.colormaps[SEQUENCE].with_extremes(bad="0.75"),
    )  # fmt: skip
    axes.set_xlabel("completed updates")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(len(values), 0)
    axes.figure.colorbar(mesh, ax=axes, label=name, fraction=0.05, pad=0.02)


def svg(figure: Figure) -> str:
    """Returns a figure as an SVG that is dark on light or light on dark, as the reader prefers.

    Equal figures give equal texts.
    """
    text = io.StringIO()
    # A salt, because the identifiers in an SVG are random otherwise.
    with matplotlib.rc_context({"svg.hashsalt": "lamb_tpu"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    head, start, rest = text.getvalue().partition("<defs>")
    # What Matplotlib draws in its default black has the ink's colour; letters name no colour.
    return head + _SVG_THEME + start + rest.replace("#000000", "currentColor")


_SVG_THEME = """<style>
svg { color: #1c2024; fill: currentColor; background: #fcfcfd; color-scheme: light dark }
@media (prefers-color-scheme: dark) { svg { color: #edeef0; background: #111113 } }
</style>
"""
