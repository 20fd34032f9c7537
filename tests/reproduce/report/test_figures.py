"""Figures of a table's runs: their content and labels; figures without content are omitted."""

import itertools
import pathlib

import pytest

from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.report import figures as figures_lib
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, summaries
from lamb_tpu.reproduce.tables import Table
from tests import figures
from tests.reproduce.papers import TABLE, with_keys, write
from tests.reproduce.test_results import add, job_of

ROWS = with_keys(
    lamb='row = "by a rule", column = "32"',
    adamw='row = "tuned", column = "64"',
    lars='row = "tuned", column = "32"',
)


def measured(
    tmp_path: pathlib.Path, text: str = TABLE, **more: object
) -> tuple[Table, list[Summary]]:
    """Returns a table with two runs of LAMB at batch 32 and two of AdamW at 64; one AdamW run diverged."""
    table = write(tmp_path, text)
    results = Results(table)
    for cell, seed, accuracy, batch in (
        ("lamb", 0, 0.90, 32),
        ("lamb", 1, 0.92, 32),
        ("adamw", 0, 0.80, 64),
        ("adamw", 1, None, 64),
    ):
        add(results, job_of(table, cell, seed), accuracy, **{"batch": batch, **more})
    return table, summaries(table, table.scales["small"], results)


def test_ratios(tmp_path: pathlib.Path) -> None:
    layers = {f"layer{n}/kernel": [[1, 0.11 * (n + 1)], [2, None]] for n in range(60)}
    layers["layer0/bias"] = [[1, 1.0], [2, 1.0]]  # does not adapt
    table, actual = measured(tmp_path, ratios=layers)
    drawn = figures_lib.all_of(table.scales["small"], actual)["ratios"]
    panels = [axes for axes in drawn.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["lamb, batch 32", "adamw, batch 64"]
    for axes in panels:
        shown = axes.collections[0].get_array()
        assert shown[:, 0].tolist() == pytest.approx([0.11 * (n + 1) for n in range(60)])
        assert shown.mask[:, 1].all()
        # With many layers, every second layer is named.
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [f"layer{n}" for n in range(0, 60, 2)]


def test_layers_that_do_not_adapt_have_no_figure(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path, ratios={"a/bias": [[1, 1.0], [2, 1.0]]})
    assert "ratios" not in figures_lib.all_of(table.scales["small"], actual)


def test_an_optimizer_has_its_smallest_and_its_largest_batch(tmp_path: pathlib.Path) -> None:
    _, actual = measured(tmp_path, ratios={"a/kernel": [[1, 0.1]]}, optimizer="lamb")
    middle = actual[0]._replace(
        cell=actual[0].cell._replace(name="middle"), records=[actual[0].records[0] | {"batch": 48}]
    )
    drawn = figures_lib.ratios([middle, actual[1], actual[0]])
    expected = ["lamb, batch 32", "adamw, batch 64"]
    assert [axes.get_title() for axes in drawn.axes if axes.get_title()] == expected


def test_empty_figures_are_omitted(tmp_path: pathlib.Path) -> None:
    table, actual = measured(tmp_path)
    scale = table.scales["small"]
    assert list(figures_lib.all_of(scale, actual)) == ["batches", "training"]
    # Two values are too few for the figure of batches.
    two = [s._replace(records=s.records[:1], values=s.values[:1]) for s in actual]
    assert list(figures_lib.all_of(scale, two)) == ["training"]
    table, actual = measured(tmp_path, batch=32)
    assert list(figures_lib.all_of(scale, actual)) == ["training"]
    # One loss or one evaluation is not a training curve.
    for losses in ([], [[4, 1.5]]):
        table, actual = measured(tmp_path, batch=32, losses=losses, evaluations=[[1.0, 0.5]])
        assert figures_lib.all_of(scale, actual) == {}
    assert figures_lib.all_of(scale, []) == {}


def test_long_paths_of_layers_fit(tmp_path: pathlib.Path) -> None:
    layers = {f"encoder/layer_{n}/attention/output/kernel": [[1, 0.1], [2, 0.2]] for n in range(30)}
    _, actual = measured(tmp_path, ratios=layers)
    figure = figures_lib.ratios(actual[:2])
    figures.check_space(figure)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [f"enc/layer_{n}/att/output" for n in range(30)]
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    for above, below in itertools.pairwise(boxes):
        assert above.y0 >= below.y1 - 1  # a pixel of margin around the letters


@pytest.mark.long
@pytest.mark.parametrize(
    "key", [key for key, table in load_all(folder()).items() if table.records.exists()]
)
def test_figures_of_the_committed_records(key: str) -> None:
    table = load_all(folder())[key]
    for scale in table.measured_scales():
        for name, figure in figures_lib.all_of(
            scale, summaries(table, scale, Results(table))
        ).items():
            (figures.check_space if name == "ratios" else figures.check)(figure)
