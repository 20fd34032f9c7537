"""The tuned form of a table: every cell tries the same number of values, including the cell's default."""

import pathlib

from lamb_tpu.reproduce import engine, jobs
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tuning import describe, forms, tuned
from tests.raising import rejected
from tests.reproduce.papers import TUNED, write
from tests.reproduce.test_results import add


def test_every_cell_has_the_same_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    form = tuned(table, 4)
    assert form.tuning is not None and form.tuning.factors[0] == 1
    assert len(set(form.tuning.factors)) == 4
    assert all(0.125 <= factor <= 8 for factor in form.tuning.factors)
    # A larger count extends a search.
    longer = tuned(table, 9)
    assert longer.tuning is not None and longer.tuning.factors[:4] == form.tuning.factors
    assert form.records == tmp_path / "small" / "digits.tuned.jsonl"
    scale = form.scales["small"]
    for cell in ("lamb", "adamw"):
        wanted = engine.searches(form, scale, form.cells[cell])
        assert [job.factor for job in wanted] == list(form.tuning.factors)
        (stage,) = jobs.stages(wanted[0])
        assert stage.overrides["data.train_split"] == "train[:90%]"
    assert describe(table) == "" and describe(form).startswith("tuned: the best of 4 values of opt")


def test_forms(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    assert forms(table, None) == [table]
    form = tuned(table, 3)
    results = Results(form)
    scale = form.scales["small"]
    for cell, count in (("lamb", 3), ("adamw", 1)):
        for job in engine.searches(form, scale, form.cells[cell])[:count]:
            add(results, job, 0.9)
    plain, actual = forms(table, None)
    assert plain is table and actual == form
    assert len(engine.due(actual, scale, actual.cells.values(), 1, results)) == 2 + 1


def test_errors(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    assert forms(table, None) == [table]
    with rejected("--tune", 4, "conflicts with the search of 3 value(s) per cell in small/digits"):
        tuned(table, 4)
