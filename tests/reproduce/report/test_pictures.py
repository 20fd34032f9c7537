"""Pictures have every seed, the interval of the mean, and nothing of runs that diverged."""

import pathlib

import numpy as np
import pytest
from matplotlib.axes import Axes

from lamb_tpu import style
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, summaries
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of


def measured(
    tmp_path: pathlib.Path, text: str = TABLE, **more: object
) -> tuple[Table, list[Summary]]:
    """A table with LAMB at two batches of two seeds, and AdamW, of which one seed diverged."""
    table = write(tmp_path, text)
    results = Results(table)
    for cell, seed, accuracy, batch in (
        ("lamb", 0, 0.90, 32),
        ("lamb", 1, 0.92, 32),
        ("adamw", 0, 0.80, 64),
        ("adamw", 1, None, 64),
    ):
        add(results, job_of(table, cell, seed), accuracy)
        found = next(r for r in results if (r["cell"], r["seed"]) == (cell, seed))
        results.add(found | {"batch": batch} | more, results.config(found))
    return table, summaries(table, table.scales["small"], results)


def heights(axes: Axes) -> set[float]:
    return {round(float(y), 3) for line in axes.lines for y in line.get_ydata()}


def test_batches(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path)
    drawn = pictures.all_of(table.scales["small"], found)
    assert list(drawn) == ["batches", "training"]
    (axes,) = drawn["batches"].axes
    # Percent: the seeds, and LAMB's mean; the run that diverged has no point.
    assert {90.0, 92.0, 91.0, 80.0} <= heights(axes)
    ends = np.concatenate(
        [segment[:, 1] for collection in axes.collections for segment in collection.get_segments()]
    )
    assert ends.min() == pytest.approx(91 - 12.706, abs=1e-2)
    # The axis is that of the runs, not of the wide interval.
    assert axes.get_ylim() == pytest.approx((80 - 0.96, 92 + 0.96))
    # Lines stand side by side at their batch.
    places = {float(x) for line in axes.lines for x in line.get_xdata()}
    assert all(min(abs(x / 32 - 1), abs(x / 64 - 1)) < 0.05 for x in places)
    assert axes.get_ylabel() == "test accuracy, % (higher is better)"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"LAMB", "AdamW"}


def test_rows_of_one_optimizer_are_lines_of_their_own(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace('name = "lamb"', 'name = "lamb", row = "by a rule", column = "32"')
    text = text.replace('name = "adamw"', 'name = "adamw", row = "tuned", column = "64"')
    text = text.replace('name = "lars"', 'name = "lars", row = "tuned", column = "32"')
    table, found = measured(tmp_path, text, optimizer="lamb")
    drawn = pictures.all_of(table.scales["small"], found)
    (axes,) = drawn["batches"].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["by a rule", "tuned"]
    # Over training each column has axes of its own, loss above and metric below.
    panels = drawn["training"].axes
    assert [axis.get_title() for axis in panels] == ["32", "64", "", ""]
    assert [len(axis.lines) for axis in panels] == [2, 2, 2, 1]


def test_cells_of_one_optimizer_and_batch_are_points_of_their_own(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path, optimizer="lamb")
    # AdamW's cell is now LAMB's too, starts at 32 as well, and grows.
    of_batch = {"lamb": (32, 3200, 100), "adamw": (32, 3200, 50)}
    found = [
        summary._replace(
            records=[
                record | dict(zip(("batch", "examples", "updates"), of_batch[summary.cell.name]))
                for record in summary.records
            ]
        )
        for summary in found
        if summary.records
    ]
    figure = pictures.batches(found, table.scales["small"].metric)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "average batch (examples)"
    points = {(float(x), round(float(y), 3)) for line in axes.lines for x, y in line.get_xydata()}
    assert {(32.0, 91.0), (64.0, 80.0)} <= points
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"lamb", "adamw"}


@pytest.mark.parametrize("length, columns", [(4, 6), (10, 6), (30, 2), (200, 1)])
def test_a_legend_below_is_no_wider_than_its_figure(length: int, columns: int) -> None:
    figure = style.figure(7.5, 5)
    names = ["n" * length for _ in range(8)]
    for name in names:
        figure.subplots().plot([1, 2], label=name)
    pictures._legend_below(figure, len(names))
    (legend,) = figure.legends
    assert legend._ncols == columns
    figure.draw_without_rendering()
    if columns > 1:
        assert legend.get_window_extent().width <= figure.bbox.width


def test_one_batch_has_no_picture_of_batches(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path, batch=32)
    assert list(pictures.all_of(table.scales["small"], found)) == ["training"]
    table, found = measured(tmp_path, batch=32, losses=[], evaluations=[])
    assert pictures.all_of(table.scales["small"], found) == {}
    assert pictures.all_of(table.scales["small"], []) == {}


def test_training(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path, evaluations=[[1.0, 0.5], [2.0, None]])
    left, right = pictures.all_of(table.scales["small"], found)["training"].axes
    assert len(left.lines) == len(right.lines) == 4 and left.get_yscale() == "log"
    assert [list(line.get_ydata()) for line in right.lines] == [[50.0]] * 4
    assert all(line.get_marker() for line in right.lines)  # of one point each
    assert not any(line.get_marker() for line in left.lines)


def test_ratios(tmp_path: pathlib.Path) -> None:
    layers = {f"layer{n}/kernel": [[1, 0.11 * (n + 1)], [2, None]] for n in range(60)}
    layers["layer0/bias"] = [[1, 1.0], [2, 1.0]]  # does not adapt
    table, found = measured(tmp_path, ratios=layers)
    drawn = pictures.all_of(table.scales["small"], found)["ratios"]
    panels = [axes for axes in drawn.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["lamb, batch 32", "adamw, batch 64"]
    for axes in panels:
        shown = axes.collections[0].get_array()
        assert shown[:, 0].tolist() == pytest.approx([0.11 * (n + 1) for n in range(60)])
        assert shown.mask[:, 1].all()
        # Of many layers every second has its name.
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [f"layer{n}/kernel" for n in range(0, 60, 2)]


def test_layers_that_do_not_adapt_have_no_picture(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path, ratios={"a/bias": [[1, 1.0], [2, 1.0]]})
    assert "ratios" not in pictures.all_of(table.scales["small"], found)


def test_an_optimizer_has_its_smallest_and_its_largest_batch(tmp_path: pathlib.Path) -> None:
    _, found = measured(tmp_path, ratios={"a/kernel": [[1, 0.1]]}, optimizer="lamb")
    middle = found[0]._replace(
        cell=found[0].cell._replace(name="middle"), records=[found[0].records[0] | {"batch": 48}]
    )
    drawn = pictures.ratios([middle, found[1], found[0]])
    assert [axes.get_title() for axes in drawn.axes if axes.get_title()] == [
        "lamb, batch 32",
        "adamw, batch 64",
    ]


def test_looks() -> None:
    two = pictures.looks({"a": "adamw", "b": "adamw", "c": "rmsprop_tf"})
    assert two["a"]["color"] == two["b"]["color"] != two["c"]["color"]
    assert (two["a"]["linestyle"], two["b"]["linestyle"]) == ("-", "--")
    for optimizers in ({"a": "lamb", "b": "lamb", "c": "lamb"}, {"a": "lamb", "b": "my.own:rule"}):
        found = pictures.looks(optimizers)
        assert len({look["color"] for look in found.values()}) == len(optimizers)


def test_runs_that_failed_do_not_squeeze_the_others() -> None:
    good = [0.93, 0.92, 0.91, 0.9]
    limits = pictures._limits([[*good, 0.1], [0.9, 0.11]], "higher")
    assert limits == pytest.approx((0.8976, 0.9324))
    assert pictures._limits([[*(1 - value for value in good), 0.9]], "lower")[1] < 0.11
    # What is no further away than the others from each other stays, and so does most of it, and
    # the best value of every batch.
    for columns in (
        [[*good, 0.85]],
        [[0.93, 0.92, 0.1, 0.11, 0.12]],
        [[0.9, 0.1]],
        [[0.9, 0.9, 0.9, 0.8]],
        [good, [0.1]],
    ):
        low, high = pictures._limits(columns, "higher")
        assert low < min(map(min, columns)) and high > 0.9
    assert pictures._limits([[]], "higher") == (-1, 1)


def test_a_mean_beyond_the_axis_is_named(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path)
    lamb, adamw, _ = found
    several = [
        lamb._replace(records=lamb.records * 2, values=[92.0, 91.0, 90.0, 93.0]),
        adamw._replace(
            records=lamb.records[:1], values=[10.0], cell=adamw.cell._replace(row="AdamW")
        ),
    ]
    figure = pictures.batches(several, table.scales["small"].metric)
    (axes,) = figure.axes
    assert axes.get_ylim()[0] > 89
    assert [text.get_text() for text in axes.texts] == ["10.0\n\u2193"]
    figure.draw_without_rendering()
    lowest = axes.transData.transform((32, 90.0))[1]
    assert axes.texts[0].get_window_extent().y1 < lowest  # it lies on no point
