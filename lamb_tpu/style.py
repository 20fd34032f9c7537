"""The common plot style: one look per optimizer, axes with units.

Up to eight lines differ in colour, marker and dashes, so they stay distinct in greyscale, on a light
or dark page, and with any colour vision. On a phone that is 390 pixels wide, text is 11 pixels high.
"""

import io
import itertools
import math
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing

T = TypeVar("T")


class Look(NamedTuple):
    """The name, colour, marker and dashes of an optimizer in plots and tables."""

    name: str
    color: str
    marker: str
    dashes: Any


# Any two colours are at least 19 apart in CIELAB, even without red, green or blue cones, and each
# has a contrast of at least 3 with the light and the dark page.
OPTIMIZERS = {
    "lamb": Look("LAMB", "#3261A6", "o", "-"),
    "lars": Look("LARS", "#009264", "D", (0, (6, 2))),
    "adamw": Look("AdamW", "#EA6C0F", "s", (0, (2, 1))),
    "momentum": Look("momentum", "#BF7EAC", "^", (0, (8, 2, 1, 2))),
    "rmsprop": Look("RMSProp", "#91984F", "v", (0, (1, 1))),
    "adam": Look("Adam", "#4191FF", "P", (0, (5, 1, 1, 1, 1, 1))),
    "nesterov": Look("Nesterov", "#A64B13", "<", (0, (12, 3))),
    "adagrad": Look("Adagrad", "#6B5D6A", "X", (0, (1, 3))),
}
# Colours for lines that do not stand for an optimizer: the optimizers' colours in order, and a neutral grey.
COLORS = tuple(look.color for look in OPTIMIZERS.values())
NEUTRAL = "0.5"
# Colour map for layers, first to last, and for values, small to large.
SEQUENCE = "viridis"
WIDTH = 4.9  # width of a figure on a page, in inches
TEXT = 10  # font size in points
MOST = len(OPTIMIZERS)  # lines in one axes; more would look alike
_NAMES = 32  # entries of a legend
_LONGEST = 60  # characters of a name in a legend
_TICKS = 12  # labelled batch sizes on an axis
_CHARACTER = 0.08  # width of a character in inches
_LONG_LAYER = 22  # longest path of a layer, in characters, that is not shortened
_MARKS = 6  # markers on a line with many points


def line(optimizer: str, variant: int = 0) -> dict[str, Any]:
    """Returns arguments of `Axes.plot` for an optimizer, a key of `OPTIMIZERS`.

    Use variant 1 for a second line of the same optimizer: it has the same colour, but other dashes
    and a hollow marker.
    """
    names = list(OPTIMIZERS)
    other = OPTIMIZERS[names[(names.index(optimizer) + MOST // 2 * variant) % MOST]]
    return _arguments(OPTIMIZERS[optimizer].color, other, bool(variant))


def numbered(number: int) -> dict[str, Any]:
    """Returns arguments of `Axes.plot` for line `number`, which does not stand for an optimizer.

    Looks repeat after `MOST` lines; to draw more, use several axes and `chunks`.
    """
    look = list(OPTIMIZERS.values())[number % MOST]
    return _arguments(look.color, look, False)


def looks(optimizers: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns arguments of `Axes.plot` for at most `MOST` lines; `optimizers` maps line names to optimizers.

    An optimizer has the same look in every figure. A second line of an optimizer has the same
    colour, but the dashes and marker of an optimizer that is not in the figure. If an optimizer has
    more than two lines or no look, all lines are numbered instead; see `numbered`.
    """
    lines = list(optimizers.values())
    if any(name not in OPTIMIZERS or lines.count(name) > 2 for name in lines):
        return {name: numbered(number) for number, name in enumerate(optimizers)}
    free = [look for name, look in OPTIMIZERS.items() if name not in lines]
    chosen: dict[str, dict[str, Any]] = {}
    for at, (name, optimizer) in enumerate(optimizers.items()):
        is_second = optimizer in lines[:at]
        base = OPTIMIZERS[optimizer]
        chosen[name] = _arguments(
            base.color, free.pop(0) if is_second and free else base, is_second
        )
    return chosen


def _arguments(color: str, look: Look, is_hollow: bool) -> dict[str, Any]:
    # No fill, because a white fill would be a spot on a dark page.
    hollow = {"markerfacecolor": "none"} if is_hollow else {}
    return {"color": color, "marker": look.marker, "linestyle": look.dashes, **hollow}


def sparse(look: Mapping[str, Any], points: int, number: int = 0) -> dict[str, Any]:
    """Returns a look with a few markers, for a line of many points.

    `number` is the line's index: it shifts the markers, so that those of several lines do not overlap.
    """
    every = max(1, points // _MARKS)
    return {**look, "markevery": (number * every // MOST % every, every), "markersize": 4}


def chunks(items: Sequence[T]) -> list[list[T]]:
    """Splits items into the fewest lists of at most `MOST` items, of nearly equal length."""
    number = -(-len(items) // MOST)
    ends = [len(items) * at // number for at in range(number + 1)] if number else []
    return [list(items[start:end]) for start, end in itertools.pairwise(ends)]


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure of `width` x `height` inches, with a layout that avoids overlaps."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def stacked(
    heights: Sequence[float], names: Sequence[Sequence[str]] = ()
) -> tuple[Figure, list[SubFigure]]:
    """Returns a figure with panels stacked vertically, and the panels; `heights` are in inches.

    `names` has the legend's names for each panel; the rows of the legend make the panel taller.
    """
    totals = [
        height + 0.2 * _rows(labels)
        for height, labels in zip(heights, names or [()] * len(heights), strict=True)
    ]
    drawn = figure(WIDTH, sum(totals))
    panels = drawn.subfigures(len(totals), 1, squeeze=False, height_ratios=totals)[:, 0]
    return drawn, list(panels)


def _rows(labels: Sequence[str]) -> int:
    """Estimates the number of rows of a legend."""
    if not labels:
        return 0
    column = 0.75 + _CHARACTER * max(len(shortened(label)) for label in labels)
    return -(-min(len(labels), _NAMES) // max(1, int(WIDTH / column)))


def figure_path(text: str, flag: str, suffix: str = ".png") -> pathlib.Path:
    """Returns the path of a figure from `text`, the value of a flag.

    Rejects a path without the suffix `suffix`, and a file that cannot be written.
    """
    path = buckets.local(text, flag)
    if path.suffix != suffix or not path.parent.is_dir():
        article = "an" if suffix == ".svg" else "a"
        problem = f"is not {article} {suffix} file in a folder that exists"
        raise UserError(flag, path, problem, "give another path, or create the folder")
    writing.check_target(path, flag)
    return path


def legend_below(
    figure: Figure | SubFigure, of: Sequence[Axes] | None = None, title: str | None = None
) -> None:
    """Adds a legend of at most 6 columns below a figure or panel, for the axes in `of` (None: all axes).

    A legend of very many lines would leave no space for the axes. With more than `_NAMES` lines,
    the legend names the first lines and counts the others.
    """
    lines_by_label: dict[str, Any] = {}
    for axes in figure.axes if of is None else of:  # type: ignore[union-attr]
        for handle, label in zip(*axes.get_legend_handles_labels()):
            # Use the line without its error bar, which would hide the dashes.
            line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
            lines_by_label.setdefault(label, line)
    if not lines_by_label:
        return
    labels, handles = list(lines_by_label), list(lines_by_label.values())
    if len(labels) > _NAMES:
        handles = [*handles[: _NAMES - 1], Line2D([], [], linestyle="")]
        labels = [*labels[: _NAMES - 1], f"and {len(labels) - _NAMES + 1} more"]
    labels = [shortened(label) for label in labels]
    for columns in range(max(1, min(len(labels), 6)), 0, -1):
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False,
            fontsize=TEXT, title=title, title_fontsize=TEXT, handlelength=3.4, columnspacing=1.2,
        )  # fmt: skip
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def inches(text: str) -> float:
    """Estimates the width of a text in a figure, in inches."""
    return _CHARACTER * len(text)


def shortened(label: str) -> str:
    """Shortens a label for a legend; keeps the end, which distinguishes long paths."""
    return label if len(label) <= _LONGEST else f"...{label[3 - _LONGEST :]}"


def dress(
    axes: Axes, title: str, x: str, y: str, better: str = "", height: float = math.inf
) -> None:
    """Adds a title, labels with units, and a faint grid to axes, and removes the box.

    `better`, 'lower' or 'higher', becomes a note after the label `y`, which is wrapped to `height`
    inches.
    """
    if better:
        # Put the note into the parentheses of a unit: 'time (s; lower is better)'.
        y = f"{y[:-1]}; {better} is better)" if y.endswith(")") else f"{y} ({better} is better)"
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    length = min(height, axes.bbox.height / axes.figure.dpi)
    axes.set_ylabel(textwrap.fill(y, max(12, int(length / 0.07))))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """Makes the x axis logarithmic, with ticks at the batch sizes, or at some of them if space is short."""
    axes.set_xscale("log", base=2)
    # Adjacent labels must not touch.
    length = axes.bbox.width / axes.figure.dpi
    most = min(_TICKS, int(length / (0.15 + max(inches(f"{batch:,}") for batch in batches))))
    ticks = batches[:: -(-len(batches) // max(1, most))]
    axes.set_xticks(ticks, [f"{batch:,}" for batch in ticks])
    axes.minorticks_off()


def log_axis(axes: Axes) -> None:
    """Makes the y axis logarithmic; call after drawing the lines.

    If the axis spans less than two decades, ticks have plain numbers such as 120, not 1.2 x 10^2.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        few = high < 5 * low  # ticks at 1, 2 and 5 of each decade would be too few
        axes.yaxis.set_major_locator(AutoLocator() if few else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def heights(line: Line2D) -> list[float]:
    """Returns the y coordinates of a line."""
    return np.asarray(line.get_ydata(), np.float64).tolist()


def cut_above(axes: Axes, most: float) -> None:
    """Limits the y axis to `most`, and states the largest value if it exceeds `most`; call after drawing.

    Otherwise a diverged run would flatten the other lines.
    """
    values = [y for line in axes.lines for y in heights(line) if math.isfinite(y)]
    low, _ = axes.get_ylim()
    if values and max(values) > most > low:
        axes.set_ylim(low, most)
        axes.set_title(f"\u2191 up to {_short(max(values))}", loc="right", fontsize=TEXT)


def _short(value: float) -> str:
    """Formats a positive number with three digits, or as a power of ten if it is large."""
    if value < 1e5:
        return f"{float(f'{value:.3g}'):,g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return rf"${digits}\times 10^{{{int(power)}}}$"


def layer_names(layers: Sequence[str]) -> list[str]:
    """Shortens layers' paths for an axis: drops '/kernel', and abbreviates the modules of long paths."""
    short = [re.sub(r"/(kernel|w|weight)(/value)?(?=\[|$)", "", layer) for layer in layers]
    short = short if len(set(short)) == len(layers) else list(layers)
    if max(map(len, short), default=0) <= _LONG_LAYER:
        return short
    brief = [
        "/".join([*(re.sub(r"^([^\W\d_]{3})[^\W\d_]+$", r"\1", part) for part in folders), name])
        for *folders, name in (layer.split("/") for layer in short)
    ]
    return brief if len(set(brief)) == len(layers) else short


def heat_map(axes: Axes, name: str, steps: Sequence[int], values: np.ndarray) -> None:
    """Plots a heat map of values (layers, records) with a logarithmic colour bar.

    The first layer is at the top. `steps` are the completed updates of each record. Values that are
    not positive are grey.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    bounds = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    if bounds[0] == bounds[1]:  # a colour scale needs two different bounds
        bounds = (bounds[0] / 2, bounds[1] * 2)
    # Each column extends from the previous record to its own.
    edges = [max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else steps[0] - 1, *steps]
    # Rasterize: thousands of paths would make an SVG of megabytes.
    mesh = axes.pcolormesh(
        edges, np.arange(len(values) + 1), np.ma.masked_where(~(values > 0), values),
        norm=LogNorm(*bounds), rasterized=True,
        cmap=matplotlib.colormaps[SEQUENCE].with_extremes(bad="0.75"),
    )  # fmt: skip
    axes.set_xlabel("completed updates")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(len(values), 0)
    axes.figure.colorbar(mesh, ax=axes, label=name, fraction=0.05, pad=0.02)


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def svg(figure: Figure) -> str:
    """Returns a figure as SVG text that adapts to light and dark themes; equal figures give equal texts."""
    text = io.StringIO()
    # Set a salt, because identifiers are random without one.
    with matplotlib.rc_context({"svg.hashsalt": "lamb_tpu"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    head, start, rest = text.getvalue().partition("<defs>")
    # Replace Matplotlib's default black with the text colour.
    return head + _SVG_THEME + start + rest.replace("#000000", "currentColor")


_SVG_THEME = """<style>
svg { color: #1c2024; fill: currentColor; background: #fcfcfd; color-scheme: light dark }
@media (prefers-color-scheme: dark) { svg { color: #edeef0; background: #111113 } }
</style>
"""
