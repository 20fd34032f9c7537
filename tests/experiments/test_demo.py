"""The study on handwritten digits: its records, and the README and the recipe that quote the records."""

import functools

import pytest

from configs import digits
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, shown, summaries
from lamb_tpu.reproduce.tables import Cell, Table
from tests.shared import ROOT

TABLES = {key: table for key, table in load_all(folder()).items() if table.paper.key == "demo"}
RATE = "optimizer.learning_rate"
SEARCHED = [key for key, table in TABLES.items() if table.tuning is not None]


@functools.cache
def measured(key: str) -> list[Summary]:
    """Returns a summary of the committed records of each cell of a table."""
    table = TABLES[key]
    return summaries(table, table.scales["small"], Results(table))


def chosen(table: Table, cell: Cell) -> float:
    """Returns the best learning-rate factor, according to the committed records of a cell's search."""
    jobs = engine.searches(table, table.scales["small"], cell)
    factor = engine.best_factor(jobs, Results(table))
    assert factor is not None
    return factor


@pytest.mark.parametrize("key", TABLES)
def test_every_cell_is_measured(key: str) -> None:
    assert {summary.status for summary in measured(key)} == {"measured"}


@pytest.mark.parametrize("key", SEARCHED)
def test_no_chosen_rate_lies_at_the_edge_of_its_grid(key: str) -> None:
    table = TABLES[key]
    assert table.tuning is not None
    factors = table.tuning.factors
    for cell in table.cells.values():
        assert min(factors) < chosen(table, cell) < max(factors), cell.name


def test_readme_has_the_numbers_of_the_records() -> None:
    scale = TABLES["demo/scaling"].scales["small"]
    rows: dict[str, list[str]] = {}
    for summary in measured("demo/scaling"):
        rows.setdefault(summary.cell.row, []).append(
            "diverged" if summary.mean is None else shown(summary.mean, scale.metric)
        )
    text = (ROOT / "README.md").read_text()
    for row, means in rows.items():
        assert f"| {row} | {' | '.join(means)} |" in text
    tuned = {
        summary.cell.row: shown(summary.mean, scale.metric)
        for summary in measured("demo/tuned_rates")
        if summary.cell.column == "1,437" and summary.mean is not None
    }
    words = " ".join(text.split())
    assert f"momentum reaches {tuned['momentum']} % at batch 1,437" in words
    assert f"AdamW {tuned['AdamW']} % and LAMB {tuned['LAMB']} %." in words


@pytest.mark.parametrize("optimizer", digits.OPTIMIZERS)
def test_the_recipe_has_the_best_rates(optimizer: str) -> None:
    table = TABLES["demo/base_rates"]
    cell = table.cells[optimizer]
    jobs = engine.searches(table, table.scales["small"], cell)
    means = engine.search_means(jobs, Results(table))
    assert means is not None
    factor = digits.OPTIMIZERS[optimizer][0]["learning_rate"] / cell.overrides[RATE]
    # Several rates may tie: LAMB has two.
    assert means[factor] == pytest.approx(max(means.values()))
