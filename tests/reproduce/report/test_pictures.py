"""Pictures have every seed, the interval of the mean, and nothing of runs that diverged."""

import pathlib

import numpy as np
import pytest

from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, summaries
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import write
from tests.reproduce.test_results import add, job_of


def measured(tmp_path: pathlib.Path, **more: object) -> tuple[Table, list[Summary]]:
    """A table with LAMB at two batches of two seeds, and AdamW, of which one seed diverged."""
    table = write(tmp_path)
    results = Results(table)
    for cell, seed, accuracy, batch in (
        ("lamb", 0, 0.90, 32), ("lamb", 1, 0.92, 32), ("adamw", 0, 0.80, 64), ("adamw", 1, None, 64)
    ):
        add(results, job_of(table, cell, seed), accuracy)
        found = next(r for r in results if (r["cell"], r["seed"]) == (cell, seed))
        results.add(found | {"batch": batch} | more, results.config(found))
    return table, summaries(table, table.scales["small"], results)


def test_batches(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path)
    drawn = pictures.all_of(table, table.scales["small"], found)
    assert list(drawn) == ["batches", "training"]
    (axes,) = drawn["batches"].axes
    points = {
        (float(x), round(float(y), 3)) for line in axes.lines for x, y in zip(*line.get_data())
    }
    # Percent: the seeds, and LAMB's mean; the run that diverged has no point.
    assert {(32, 90.0), (32, 92.0), (32, 91.0), (64, 80.0)} <= points
    ends = np.concatenate([
        segment[:, 1] for collection in axes.collections
        for segment in collection.get_segments()
    ])
    assert ends.min() == pytest.approx(91 - 12.706, abs=1e-2)
    assert axes.get_ylabel() == "test accuracy, % (higher is better)"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"LAMB", "AdamW"}


def test_one_batch_has_no_picture_of_batches(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path, batch=32)
    assert list(pictures.all_of(table, table.scales["small"], found)) == ["training"]
    table, found = measured(tmp_path, batch=32, losses=[], evaluations=[])
    assert pictures.all_of(table, table.scales["small"], found) == {}
    assert pictures.all_of(table, table.scales["small"], []) == {}


def test_training(tmp_path: pathlib.Path) -> None:
    table, found = measured(tmp_path, evaluations=[[1.0, 0.5], [2.0, None]])
    left, right = pictures.all_of(table, table.scales["small"], found)["training"].axes
    assert len(left.lines) == len(right.lines) == 4 and left.get_yscale() == "log"
    assert [list(line.get_ydata()) for line in right.lines] == [[50.0]] * 4


def test_ratios(tmp_path: pathlib.Path) -> None:
    layers = {f"layer{n}/kernel": [[1, 0.1 * (n + 1)], [2, None]] for n in range(12)}
    table, found = measured(tmp_path, ratios=layers)
    (axes,) = pictures.all_of(table, table.scales["small"], found)["ratios"].axes
    assert len(axes.lines) == 12 and axes.get_yscale() == "log"
    # Of many layers the legend has the first and the last.
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "layer0/kernel", "layer11/kernel"
    ]
