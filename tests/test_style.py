"""The look of every picture: one colour for one optimizer."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba

from lamb_tpu import style
from tests.shared import ROOT


def test_colours_and_markers_are_those_of_one_optimizer_each() -> None:
    looks = list(style.OPTIMIZERS.values())
    assert len({look.marker for look in looks}) == len({look.name for look in looks}) == len(looks)
    colors = [to_rgb(look.color) for look in looks] + [to_rgb(color) for color in style.COLORS]
    for one, other in itertools.combinations(colors, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.15


@pytest.mark.parametrize("folder", ["lamb_tpu", "experiments"])
def test_no_other_module_has_colours_of_its_own(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        if path.name != "style.py":
            assert not re.search(r"#[0-9A-Fa-f]{6}\b", path.read_text()), path


def test_second_line_of_an_optimizer_has_its_colour() -> None:
    first, second = style.line("adamw"), style.line("adamw", 1)
    assert first["color"] == second["color"] == style.OPTIMIZERS["adamw"].color
    assert "linestyle" not in first and second["linestyle"] == "--"


def test_axes_say_what_they_show() -> None:
    axes = style.figure(4, 3).subplots()
    style.dress(axes, "BERT on books", "examples read", "loss (nats)", "lower")
    assert axes.get_title() == "BERT on books" and axes.get_xlabel() == "examples read"
    assert axes.get_ylabel() == "loss (nats; lower is better)"
    style.dress(axes, "", "epochs", "accuracy", "higher")
    assert axes.get_ylabel() == "accuracy (higher is better)"
    axes.plot([10_000, 20_000], [1, 2])
    axes.figure.canvas.draw()
    assert "10,000" in [label.get_text() for label in axes.get_xticklabels()]


def test_axis_of_batches_has_a_tick_at_each() -> None:
    axes = style.figure(4, 3).subplots()
    axes.plot([64, 4096], [1, 2])
    style.batch_axis(axes, [64, 4096])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "4,096"]


@pytest.mark.parametrize(
    "values, labels",
    [
        ((105, 172), ["110", "120", "130", "140", "150", "160", "170"]),
        ((72, 180), ["80", "100", "120", "140", "160", "180"]),
        ((0.4, 3), ["0.5", "1", "2"]),
    ],
)
def test_short_logarithmic_axis_has_plain_numbers(
    values: tuple[float, float], labels: list[str]
) -> None:
    figure = style.figure(4, 3)
    axes = figure.subplots()
    axes.plot([0, 1], values)
    style.log_axis(axes)
    figure.canvas.draw()
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    assert [label.get_text() for tick, label in ticks if low <= tick <= high] == labels


def test_long_logarithmic_axis_has_powers_of_ten() -> None:
    axes = style.figure(4, 3).subplots()
    axes.plot([0, 1], [1e-5, 1.0])
    style.log_axis(axes)
    assert axes.yaxis.get_major_formatter()(1e-3) == r"$\mathdefault{10^{-3}}$"


def test_heat_map_is_grey_where_there_is_no_value() -> None:
    axes = style.figure(4, 3).subplots()
    style.heat_map(axes, "ratio", [2, 4], np.array([[0.1, 1.0], [np.nan, 0.0]]))
    mesh = axes.collections[0]
    shown = mesh.to_rgba(mesh.get_array())
    is_grey = (shown == to_rgba("0.75")).all(-1)
    assert is_grey.tolist() == [[False, False], [True, True]]
    assert axes.get_ylim() == (2, 0) and axes.get_xlim() == (0, 4)


def test_svg_is_readable_in_dark_and_light() -> None:
    def drawn() -> str:
        axes = style.figure(4, 3).subplots()
        axes.plot([1, 2], [1, 2], color=style.OPTIMIZERS["lamb"].color)
        style.dress(axes, "digits", "epochs", "loss")
        return style.svg(axes.figure)

    text = drawn()
    assert text == drawn()
    assert "prefers-color-scheme: dark" in text and "currentColor" in text
    # No ink of one colour, no ground of one colour: only the line and the grid have theirs.
    _, _, body = text.partition("</style>")
    named = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", body))
    assert named == {style.OPTIMIZERS["lamb"].color.lower(), "#b0b0b0"}


def test_thirty_lines_without_an_optimizer_look_different() -> None:
    looks = {(look["color"], look["linestyle"]) for look in map(style.numbered, range(30))}
    assert len(looks) == 30
