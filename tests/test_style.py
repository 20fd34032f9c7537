"""Tests the look of figures: each optimizer has one colour, marker and type of line."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba

from lamb_tpu import style
from tests import figures
from tests.shared import ROOT

# Linear RGB as seen without red, green or blue cones (Machado et al. 2009, severity 1).
VISION = {
    "all cones": np.eye(3),
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(color: str) -> np.ndarray:
    values = np.array(to_rgb(color))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_differ_with_any_colour_vision(vision: str) -> None:
    seen = [lab(np.array(VISION[vision]) @ linear(color)) for color in style.COLORS]
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 18


@pytest.mark.parametrize("page", ["#fcfcfd", "#111113"])
def test_colours_are_seen_on_light_and_dark(page: str) -> None:
    def luminance(color: str) -> float:
        return float(linear(color) @ [0.2126, 0.7152, 0.0722])

    for color in style.COLORS:
        low, high = sorted([luminance(color), luminance(page)])
        assert (high + 0.05) / (low + 0.05) >= 3, color


def test_looks_differ_without_colour() -> None:
    looks = list(style.OPTIMIZERS.values())
    for part in ("name", "color", "marker", "dashes"):
        assert len({getattr(look, part) for look in looks}) == len(looks) == style.MOST
    assert [style.numbered(n)["color"] for n in range(8)] == list(style.COLORS)


@pytest.mark.parametrize(
    "optimizers",
    [
        {"a": "adamw", "b": "adamw", "c": "rmsprop"},
        {"a": "lamb", "b": "lamb", "c": "adam", "d": "adam", "e": "lars", "f": "lars"},
        {f"{name}{n}": name for n in range(2) for name in ("lamb", "lars", "adamw", "momentum")},
        {"a": "lamb", "b": "lamb", "c": "lamb"},
        {"a": "lamb", "b": "my.own:rule"},
    ],
)
def test_lines_of_a_figure_look_different_without_colour(optimizers: dict[str, str]) -> None:
    actual = style.looks(optimizers)
    assert list(actual) == list(optimizers)
    for part in ("marker", "linestyle"):
        assert len({str(look[part]) for look in actual.values()}) == len(optimizers)


@pytest.mark.parametrize("count, lengths", [(0, []), (8, [8]), (9, [4, 5]), (18, [6, 6, 6])])
def test_chunks(count: int, lengths: list[int]) -> None:
    actual = style.chunks(range(count))
    assert list(map(len, actual)) == lengths
    assert [item for part in actual for item in part] == list(range(count))


@pytest.mark.parametrize("folder", ["lamb_tpu", "experiments"])
def test_no_other_module_defines_colours(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        if path.name != "style.py":
            assert not re.search(r"#[0-9A-Fa-f]{6}\b", path.read_text()), path


def test_second_line_of_an_optimizer_has_its_colour() -> None:
    actual = style.looks({"a": "adamw", "b": "adamw", "c": "rmsprop"})
    assert actual["a"] == style.line("adamw") and actual["c"] == style.line("rmsprop")
    assert actual["a"]["color"] == actual["b"]["color"] and "none" == actual["b"]["markerfacecolor"]
    for name, look in style.OPTIMIZERS.items():
        first, second = style.line(name), style.line(name, 1)
        assert first["color"] == second["color"] == look.color
        assert first["linestyle"] != second["linestyle"] and first["marker"] != second["marker"]
        assert second["markerfacecolor"] == "none"  # a white fill would be a spot on a dark page


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
    # Only the lines and the grid have a colour; text and background follow the reader's theme.
    _, _, body = text.partition("</style>")
    named = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", body))
    assert named == {style.OPTIMIZERS["lamb"].color.lower(), "#b0b0b0"}


def test_a_legend_shows_the_dashes_of_lines_with_intervals() -> None:
    figure = style.figure(style.WIDTH, 3)
    axes = figure.subplots()
    axes.errorbar([1, 2], [1, 2], 0.5, label="a", **style.line("adamw"))
    axes.errorbar([1, 2], [1, 2], 0.5, label="b", **style.line("adamw", 1))
    style.legend_below(figure)
    first, second = figure.legends[0].legend_handles
    assert first._dash_pattern != second._dash_pattern
    assert first.get_marker() != second.get_marker()
    figures.check_space(figure)


def test_panels_have_space_for_their_legends() -> None:
    figure, (upper, lower) = style.stacked([2.0, 2.0], [["a"], [f"name {n}" * 3 for n in range(8)]])
    for part, number in ((upper, 1), (lower, 8)):
        axes = part.subplots()
        for line in range(number):
            axes.plot([0, 1], [0, line], **style.numbered(line), label=f"name {line}" * 3)
        style.dress(axes, "title", "x", "y")
        style.legend_below(part)
    figures.check(figure)
    heights = [axes.bbox.height for axes in figure.axes]
    assert min(heights) > 0.7 * max(heights) > 60


def test_one_large_value_does_not_take_the_height() -> None:
    axes = style.figure(style.WIDTH, 3).subplots()
    axes.plot([0, 1, 2], [1, 2, 4_996])
    style.cut_above(axes, 20)
    assert axes.get_ylim()[1] == 20 and axes.get_title(loc="right") == "\u2191 up to 5,000"
    style.cut_above(axes, 1e4)
    assert axes.get_ylim()[1] == 20


@pytest.mark.parametrize(
    "layers, names",
    [
        (["a/kernel", "b/kernel[3]", "c/w/value"], ["a", "b[3]", "c"]),
        (["a/kernel", "a/w"], ["a/kernel", "a/w"]),
        (
            ["encoder/layer_1/attention/output/kernel", "pooler/kernel"],
            ["enc/layer_1/att/output", "pooler"],
        ),
        (
            ["attention/long_long_long_name", "attend/long_long_long_name"],
            ["attention/long_long_long_name", "attend/long_long_long_name"],
        ),
    ],
)
def test_layers_have_short_names(layers: list[str], names: list[str]) -> None:
    assert style.layer_names(layers) == names


@pytest.mark.parametrize("length, columns", [(4, 6), (10, 4), (30, 2), (200, 1)])
def test_a_legend_below_is_no_wider_than_its_figure(length: int, columns: int) -> None:
    figure = style.figure(7.5, 5)
    names = [f"{number}{'n' * (length - 1)}" for number in range(8)]
    for name in names:
        figure.subplots().plot([1, 2], label=name)
    style.legend_below(figure)
    (legend,) = figure.legends
    assert legend._ncols == columns
    figure.draw_without_rendering()
    if columns > 1:
        assert legend.get_window_extent().width <= figure.bbox.width


def test_a_legend_of_many_lines_names_the_first_and_counts_the_others() -> None:
    figure = style.figure(7.5, 5)
    axes = figure.subplots()
    for number in range(200):
        axes.plot([1, 2], label=f"{number:100}")
    style.legend_below(figure)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(texts) == 32 and texts[-1] == "and 169 more"
    assert all(len(text) <= 63 and text.endswith(str(n)) for n, text in enumerate(texts[:-1]))


def test_many_batches_have_some_ticks() -> None:
    axes = style.figure(4, 3).subplots()
    style.batch_axis(axes, range(1, 101))
    assert 6 <= len(axes.get_xticks()) <= 12
    style.batch_axis(axes, [64, 4096])
    assert list(axes.get_xticks()) == [64, 4096]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "4,096"]
