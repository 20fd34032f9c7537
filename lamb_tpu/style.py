"""The common style of the project's plots: one colour for each optimizer, axes with units.

It imports Matplotlib, so only modules that draw import it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Look(NamedTuple):
    """An optimizer's name in plots and tables, its colour and its marker."""

    name: str
    color: str
    marker: str


# Colours that people with any colour vision can tell apart (Okabe and Ito).
OPTIMIZERS = {
    "lamb": Look("LAMB", "#0072B2", "o"),
    "lars": Look("LARS", "#009E73", "D"),
    "adamw": Look("AdamW", "#D55E00", "s"),
    "momentum": Look("momentum", "#CC79A7", "^"),
    "rmsprop": Look("RMSProp", "#E69F00", "v"),
}
# For lines that are not optimizers: colours in order, and a neutral one.
COLORS = ("#333333", "#56B4E9", "#B8860B", "#8C6BB1")
NEUTRAL = "0.5"
# Colour map from the first layer of a network to its last, and from small values to large.
SEQUENCE = "viridis"


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
