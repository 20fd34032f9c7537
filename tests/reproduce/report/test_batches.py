"""The figure of the metric by batch size has every seed, the intervals, and annotations at the edges."""

import pathlib

import numpy as np
import pytest
from msgspec.structs import replace

from lamb_tpu.reproduce.report import batches
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.tables import Metric
from tests import figures
from tests.reproduce.report.test_figures import ROWS, measured

PERPLEXITY = Metric("perplexity", "test perplexity", 1, "lower")


def point(summary: Summary, name: str, value: float, row: str = "", **more: object) -> Summary:
    """Returns the summary of a new cell with one run."""
    return summary._replace(
        cell=summary.cell._replace(name=name, row=row),
        values=[value],
        records=[summary.records[0] | more],
    )


def many(summary: Summary, number: int) -> list[Summary]:
    """Returns `number` cells, alternately of SGD at batch size 64 and of Adam at batch size 128."""
    cells = []
    for n in range(number):
        name, batch = (("sgd", 64), ("adam", 128))[n % 2]
        more = {"batch": batch, "examples": 4 * 64 * (1 + n % 3), "optimizer": name}
        cells.append(point(summary, f"{name}-{n}", 90.0 + n / 10, **more))
    return cells


def test_batches(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    figure = batches.draw(actual[:2], table.scales["small"].metric)
    (axes,) = figure.axes
    # In percent: the seeds and LAMB's mean; the diverged run has no point.
    assert {90.0, 92.0, 91.0, 80.0} <= figures.heights(axes)
    ends = np.concatenate(
        [segment[:, 1] for collection in axes.collections for segment in collection.get_segments()]
    )
    assert ends.min() == pytest.approx(91 - 12.706, abs=1e-2)
    # The axis covers the runs and the annotations, but not the wide interval.
    low, high = axes.get_ylim()
    assert 77 < low < 80 - 0.96 and high == pytest.approx(92 + 0.96)
    assert [text.get_text() for text in axes.texts] == ["×1"]
    # Lines are drawn side by side at their batch.
    positions = {float(x) for line in axes.lines for x in line.get_xdata()}
    assert all(min(abs(x / 32 - 1), abs(x / 64 - 1)) < 0.05 for x in positions)
    assert axes.get_ylabel() == "test accuracy, % (higher is better)"
    assert set(figures.names(figure)) == {"LAMB", "AdamW"}
    figures.check(figure)


def test_rows_of_one_optimizer_are_separate_lines(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path, ROWS, optimizer="lamb")
    figure = batches.draw([s for s in actual if s.records], table.scales["small"].metric)
    assert figures.names(figure) == ["by a rule", "tuned"]
    figures.check(figure)


def test_cells_of_one_optimizer_and_batch_are_separate_points(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path, optimizer="lamb")
    # Now the second cell also uses LAMB and starts at batch 32, but its batch grows.
    of_batch = {"lamb": (32, 3200, 100), "adamw": (32, 3200, 50)}
    actual = [
        summary._replace(
            records=[
                record | dict(zip(("batch", "examples", "updates"), of_batch[summary.cell.name]))
                for record in summary.records
            ]
        )
        for summary in actual
        if summary.records
    ]
    figure = batches.draw(actual, table.scales["small"].metric)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "average batch (examples)"
    points = {(float(x), round(float(y), 3)) for line in axes.lines for x, y in line.get_xydata()}
    assert {(32.0, 91.0), (64.0, 80.0)} <= points
    assert set(figures.names(figure)) == {"lamb", "adamw"}


def test_runs_that_failed_do_not_squeeze_the_others() -> None:
    good = [0.93, 0.92, 0.91, 0.9]
    limits = batches._limits([[*good, 0.1], [0.9, 0.11]], "higher")
    assert limits == pytest.approx((0.8976, 0.9324))
    assert batches._limits([[*(1 - value for value in good), 0.9]], "lower")[1] < 0.11
    # A value stays inside the axes unless it is much further from the other values than these are from each
    # other. Most values, and the best value of every batch, always stay inside.
    for columns in (
        [[*good, 0.85]],
        [[0.93, 0.92, 0.1, 0.11, 0.12]],
        [[0.9, 0.1]],
        [[0.9, 0.9, 0.9, 0.8]],
        [good, [0.1]],
    ):
        low, high = batches._limits(columns, "higher")
        assert low < min(map(min, columns)) and high > 0.9
    assert batches._limits([[]], "higher") == (-1, 1)


def test_a_mean_beyond_the_axis_is_named(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    lamb, adamw, _ = actual
    several = [
        lamb._replace(records=lamb.records * 2, values=[92.0, 91.0, 90.0, 93.0]),
        adamw._replace(
            records=lamb.records[:1], values=[10.0], cell=adamw.cell._replace(row="AdamW")
        ),
    ]
    figure = batches.draw(several, table.scales["small"].metric)
    (axes,) = figure.axes
    assert axes.get_ylim()[0] > 89
    assert [text.get_text() for text in axes.texts] == ["\u2193 10.0"]
    figure.draw_without_rendering()
    lowest = axes.transData.transform((32, 90.0))[1]
    assert axes.texts[0].get_window_extent().y1 < lowest  # the text covers no point


def test_fourteen_points_are_in_axes_of_two_optimizers(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    figure = batches.draw(many(actual[0], 14), table.scales["small"].metric)
    figures.check(figure)
    assert [axes.get_title() for axes in figure.axes] == ["sgd", "Adam"]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    assert sorted(figures.names(figure)) == sorted(s.cell.name for s in many(actual[0], 14))


def test_points_at_one_batch_are_side_by_side(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    cells = [
        summary._replace(records=[summary.records[0] | {"batch": 64, "examples": 4 * 64}])
        for summary in many(actual[0], 3)
    ]
    figure = batches.draw(cells, table.scales["small"].metric)
    positions = {
        float(line.get_xdata()[0]) for line in figure.axes[0].lines if line.get_xdata().size
    }
    assert len(positions) == 3 and all(56 < x < 73 for x in positions)


def test_values_of_several_decades_have_a_logarithmic_axis(tmp_path: pathlib.Path) -> None:
    _, actual = measured(tmp_path)
    cells = [
        point(actual[0], f"legw-{batch}", value, "LEGW", batch=batch)
        for batch, value in ((20, 242.0), (40, 300.0), (160, 27_252.0))
    ]
    figure = batches.draw(cells, PERPLEXITY)
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log" and 100 < low < 242 and 27_252 < high < 1e5
    figures.check(figure)


def test_names_at_the_edge_do_not_touch(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    good = [0.931, 0.93, 0.925, 0.92, 0.915, 0.91, 0.91, 0.9]
    sizes = [2**n for n in range(5, 13)]
    cells = [
        point(actual[0], f"{row}-{batch}", value, row, batch=batch)
        for row, batches_of, values in (
            ("good", sizes, good),
            ("bad", sizes[5:], [0.1135] * 3),
            ("worse", sizes[5:], [0.1135] * 3),
        )
        for batch, value in zip(batches_of, values, strict=True)
    ]
    metric = replace(table.scales["small"].metric, digits=4)
    figure = batches.draw(cells, metric)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    for at, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[at + 1 :])
        assert one.y1 < axes.transData.transform((32, 0.9))[1]
    figures.check(figure)
