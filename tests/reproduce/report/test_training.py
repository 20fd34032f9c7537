"""Training curves: a line for each run with a recorded curve, a name for each line, few lines per plot."""

import pathlib

from lamb_tpu import style
from lamb_tpu.reproduce.report import batches, training
from lamb_tpu.reproduce.summary import Summary
from tests import figures
from tests.reproduce.report.test_figures import ROWS, measured

EVALUATIONS = [[1.0, 0.5], [2.0, 0.6]]


def test_every_run_is_drawn(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path, evaluations=[[1.0, 0.5], [2.0, None], [3.0, 0.6]])
    figure = training.draw(actual[:2], table.scales["small"].metric)
    left, right = figure.axes
    assert len(left.lines) == len(right.lines) == 4 and left.get_yscale() == "log"
    assert [list(line.get_ydata()) for line in right.lines] == [[50.0, 60.0]] * 4
    assert figures.names(figure) == ["lamb", "adamw"]
    figures.check(figure)


def test_a_single_value_per_run_is_not_a_curve(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path, evaluations=[[1.0, 0.5], [2.0, None]])
    metric = table.scales["small"].metric
    assert training.quantities(actual, metric) == [0]
    (axes,) = training.draw(actual[:2], metric).axes
    assert axes.get_ylabel() == "training loss"


def test_runs_without_a_curve_are_counted_and_take_no_name(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    lamb, adamw, _ = actual
    # The first record of LAMB has no curve, like older records; the last cell has no curves at all.
    blank = {"losses": [], "evaluations": []}
    lamb = lamb._replace(records=[lamb.records[0] | blank, lamb.records[1]])
    none = adamw._replace(
        cell=adamw.cell._replace(name="none"), records=[r | blank for r in adamw.records]
    )
    figure = training.draw([lamb, adamw, none], table.scales["small"].metric)
    assert figures.names(figure) == ["lamb (1 of 2 runs)", "adamw"]
    (axes,) = figure.axes
    assert len(axes.lines) == 3
    figures.check(figure)


def test_columns_have_separate_axes(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path, ROWS, optimizer="lamb", evaluations=EVALUATIONS)
    figure = training.draw([s for s in actual if s.records], table.scales["small"].metric)
    assert [part.get_suptitle() for part in figure.subfigs[:2]] == ["batch 32", "batch 64"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2, 2]
    assert figures.names(figure) == ["by a rule", "tuned"]  # one legend for both columns
    figures.check(figure)


def cells(summary: Summary, number: int, **more: object) -> list[Summary]:
    """Returns `number` cells of two optimizers; each cell has two runs."""
    return [
        summary._replace(
            cell=summary.cell._replace(name=f"{('momentum', 'lars')[n % 2]}-{n}"),
            records=[record | {"evaluations": EVALUATIONS} | more for record in summary.records],
        )
        for n in range(number)
    ]


def test_thirty_cells_are_in_axes_of_few(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    figure = training.draw(cells(actual[0], 30), table.scales["small"].metric)
    expected = ["momentum, 1 of 2", "momentum, 2 of 2", "LARS, 1 of 2", "LARS, 2 of 2"]
    assert [part.get_suptitle() for part in figure.subfigs] == expected
    figures.check(figure)
    assert sorted(figures.names(figure)) == sorted(s.cell.name for s in cells(actual[0], 30))
    assert sum(len(axes.lines) for axes in figure.axes) == 2 * 30 * 2
    losses = figure.axes[::2]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in losses}) == 1


def test_lines_look_as_in_the_figure_of_batches(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    rows = [
        summary._replace(
            cell=summary.cell._replace(row=f"rule {n % 3}", column=f"{(32, 64)[n // 3]:,}"),
            # One rule has no run at the first batch, another rule has no curve there.
            records=[
                record
                | {"batch": (32, 64)[n // 3], "optimizer": "sgd"}
                | ({"losses": []} if n == 1 else {})
                for record in summary.records
            ],
        )
        for n, summary in enumerate(cells(actual[0], 6, evaluations=[]))
        if n
    ]
    metric = table.scales["small"].metric
    drawn = [batches.draw(rows, metric), training.draw(rows, metric)]
    assert [part.get_suptitle() for part in drawn[1].subfigs[:2]] == ["batch 32", "batch 64"]
    looks = [
        {
            text.get_text(): figures.look(handle)
            for legend in figures.legends(figure)
            for text, handle in zip(legend.get_texts(), legend.legend_handles)
        }
        for figure in drawn
    ]
    label = looks[1].pop("rule 1 (2 of 4 runs)")
    assert looks[1] | {"rule 1": label} == looks[0]


def test_every_column_has_axes_whatever_their_number(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    many = [
        summary._replace(cell=summary.cell._replace(row="one", column=str(n)))
        for n, summary in enumerate(cells(actual[0], 9))
    ]
    figure = training.draw(many, table.scales["small"].metric)
    assert len(figure.axes) == 18 and figures.names(figure) == ["one"]
    figures.check(figure)


def test_a_run_that_diverged_leaves_the_others_their_height(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    lamb, adamw, _ = actual
    losses = [[1, 2.3], [2, 4e10], [3, 3e9]]
    adamw = adamw._replace(records=[record | {"losses": losses} for record in adamw.records])
    figure = training.draw([lamb, adamw], table.scales["small"].metric)
    (axes,) = figure.axes
    assert axes.get_ylim()[1] < 50
    assert axes.get_title(loc="right") == r"↑ up to $4.0\times 10^{10}$"
    figures.check(figure)


def test_colours_of_few_lines_are_the_optimizers(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    (axes,) = training.draw(actual[:2], table.scales["small"].metric).axes
    expected = {style.OPTIMIZERS["lamb"].color, style.OPTIMIZERS["adamw"].color}
    assert {line.get_color() for line in axes.lines} == expected
