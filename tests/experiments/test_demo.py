"""`make demo`, and what is told of the study on handwritten digits."""

import functools
import pathlib
import re
import shlex

import pytest

from configs import digits
from lamb_tpu.reproduce import __main__ as command
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
    """Returns what the committed records say of each cell of a table."""
    table = TABLES[key]
    return summaries(table, table.scales["small"], Results(table))


def chosen(table: Table, cell: Cell) -> float:
    """Returns the factor of a cell that the committed records of its search found best."""
    jobs = engine.searches(table, table.scales["small"], cell)
    factor = engine.best_factor(jobs, Results(table))
    assert factor is not None
    return factor


@pytest.mark.long
def test_commands_of_make_demo(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^demo: setup\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    monkeypatch.chdir(tmp_path)
    for line in recipe[1].replace("$(FLAGS)", "--seeds=1 --cells=lamb-legw-512").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "$(DEMO)"
        command.main(command._parse(arguments))
    told = capsys.readouterr().out
    assert re.search(r"LAMB, LEGW +- +- +\d\d\.\d +-\n", told)
    paths = [pathlib.Path(line) for line in told.splitlines() if line.startswith("runs/")]
    assert {path.name for path in paths} >= {"demo-scaling.html", "demo-scaling.md"}
    assert any(path.suffix == ".svg" for path in paths) and all(path.exists() for path in paths)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


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


@pytest.mark.parametrize("key", ["demo/scaling", "demo/tuned_rates"])
def test_readme_has_the_numbers_of_the_records(key: str) -> None:
    scale = TABLES[key].scales["small"]
    rows: dict[str, list[str]] = {}
    for summary in measured(key):
        rows.setdefault(summary.cell.row, []).append(shown(summary.mean, scale.metric))
    text = (ROOT / "README.md").read_text()
    for row, means in rows.items():
        assert f"| {row} | {' | '.join(means)} |" in text


@pytest.mark.parametrize("optimizer", digits.OPTIMIZERS)
def test_the_recipe_has_the_best_rates(optimizer: str) -> None:
    table = TABLES["demo/base_rates"]
    cell = table.cells[optimizer]
    jobs = engine.searches(table, table.scales["small"], cell)
    means = engine.search_means(jobs, Results(table))
    assert means is not None
    factor = digits.OPTIMIZERS[optimizer][0]["learning_rate"] / cell.overrides[RATE]
    # Another rate may be as good: LAMB has two.
    assert means[factor] == pytest.approx(max(means.values()))
