"""The look of every picture of the project: one colour for one optimizer, axes with units.

It imports Matplotlib, so only what draws imports it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Look(NamedTuple):
    """An optimizer's name in pictures and tables, its colour and its marker."""

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
# For what is no optimizer: in order, and one of no special meaning.
COLORS = ("#333333", "#56B4E9", "#B8860B", "#8C6BB1")
NEUTRAL = "0.5"
# From the first layer of a network to its last; values from small to large.
SEQUENCE = "viridis"


def line(optimizer: str, variant: int = 0) -> dict[str, Any]:
    """Arguments of `Axes.plot` for an optimizer, one of `OPTIMIZERS`.

    Args:
      optimizer: its name in configs.
      variant: 1 for a second line of the same optimizer, as under another rule: dashed, hollow.
    """
    look = OPTIMIZERS[optimizer]
    style: dict[str, Any] = {"color": look.color, "marker": look.marker}
    if variant:
        style |= {"linestyle": "--", "markerfacecolor": "white"}
    return style


def figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, laid out so that nothing overlaps."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def dress(axes: Axes, title: str, x: str, y: str, better: str = "") -> None:
    """Gives axes their title and labels, a faint grid, and no box.

    Args:
      axes: of one plot.
      title: names data and model where the figure's does not.
      x, y: the quantities, with units.
      better: 'lower' or 'higher', where one of them is.
    """
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(f"{y} ({better} is better)" if better else y)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """A logarithmic axis of batch sizes with a tick at each."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
