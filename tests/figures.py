"""Checks of figures: lines are named and distinguishable, and nothing overlaps."""

import itertools
import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from lamb_tpu import style

PHONE = 390  # width of a narrow screen, in pixels
READABLE = 10.8  # height of the smallest readable text, in pixels


def look(line: Any) -> tuple[str, str]:
    return str(line.get_color()), str(line.get_marker())


def legends(figure: FigureBase) -> list[Legend]:
    return [
        *figure.legends,
        *(actual for part in figure.subfigs for actual in legends(part)),
        *(actual for axes in figure._localaxes if (actual := axes.get_legend())),
    ]


def names(figure: FigureBase) -> list[str]:
    return [text.get_text() for legend in legends(figure) for text in legend.get_texts()]


def check(figure: Figure) -> None:
    """Fails if a line has no name, two lines look alike, or a text is too small or overlaps data."""
    check_space(figure)
    for part in [figure, *figure.subfigs]:
        if not part._localaxes:
            continue
        panel_legends = legends(part) or legends(figure)
        handles = [handle for legend in panel_legends for handle in legend.legend_handles]
        for one, other in itertools.combinations(handles, 2):
            # Lines must differ in greyscale too.
            assert one.get_marker() != other.get_marker(), names(part)
            assert one.get_color() != other.get_color() or (
                one.get_markerfacecolor() != other.get_markerfacecolor()
            ), names(part)
            dashes = one._dash_pattern != other._dash_pattern
            assert dashes or one.get_linestyle() == "None", names(part)
        known = set(map(look, handles))
        for axes in part._localaxes:
            # The markers '_' and '|' are the ends of intervals.
            drawn = {
                look(line)
                for line in axes.lines
                if len(line.get_xdata()) and line.get_marker() not in ("_", "|")
            }
            assert drawn <= known, (drawn - known, names(part))
            assert len(drawn) <= style.MOST


def check_space(figure: Figure, readable: bool = True) -> None:
    """Fails if a legend overlaps axes, a text is too small, or the figure has a white area.

    A white area would be a spot on a dark page. With `readable=False`, texts may have any size, for
    figures that no phone shows.
    """
    figure.draw_without_rendering()
    for legend, axes in itertools.product(legends(figure), figure.axes):
        if overlap := Bbox.intersection(legend.get_window_extent(), axes.bbox):
            assert overlap.width < 1 or overlap.height < 1, axes.get_title()
    scale = PHONE / 72 / figure.get_figwidth()
    for text in figure.findobj(Text):
        if readable and text.get_visible() and text.get_text():
            assert text.get_fontsize() * scale >= READABLE, text.get_text()
    assert not re.search(r"#fff(fff)?\b", style.svg(figure))


def heights(axes: Axes) -> set[float]:
    return {round(float(y), 3) for line in axes.lines for y in line.get_ydata()}
