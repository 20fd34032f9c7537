"""Pages have the rows of every scale, measured scales first."""

import pathlib

import pytest

from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.loading import load_all
from lamb_tpu.reproduce.report import pages
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tuning import tuned
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of

SCALES = TABLE.replace(
    "[scales.small]",
    """[scales.paper]
config = "digits:batch=64"
overrides = {duration = "4 steps", batch_size = 128}
examples = 1_437
hardware = "a pod"

[scales.small]
about = "shorter"
""",
)


def test_measured_scales_come_first(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, SCALES)
    page = pages.of_table(table, None)
    assert [part.scale.name for part in page.parts] == ["paper", "small"]
    assert page.parts[0].summary == "0 of 3 cells have runs. Cost: a pod."
    assert not any(
        part.figures for part in page.parts
    )  # learning rates are not drawn for an empty table
    assert {row.state for row in page.parts[0].rows} == {"open", "unknown"}
    # If nothing was measured, the cell is shown at the paper's scale.
    expected = [("paper", "lamb"), ("paper", "adamw"), ("paper", "lars")]
    assert [(part.scale.name, row.cell.name) for part, row in page.best] == expected
    add(Results(table), job_of(table), 0.92)
    page = pages.of_table(table, None)
    assert [part.scale.name for part in page.parts] == ["small", "paper"]
    assert page.parts[0].about == "Shorter." and page.parts[0].num_measured == 1
    row = page.parts[0].rows[0]
    assert (row.state, row.status, row.by_seed) == ("begun", "1 of 2 seeds", ((0, "92.0"),))
    assert page.hours == row.hours == pytest.approx(1.5 / 3600)
    assert [part.scale.name for part, _ in page.best] == ["small"] * 3
    assert row.run == ("python -m lamb_tpu.reproduce run small/digits --cells=lamb --scale=small")
    assert (row.label, row.optimizer, row.batch) == (
        "measured at another scale, 1 of 2 seeds",
        "LAMB",
        "128",
    )
    assert row.configs[0].recipe == "digits:batch=128,optimizer=lamb"
    assert dict(row.configs[0].values)["optimizer.name"] == "'lamb'"
    # Both scales have the same schedule, so it is drawn once.
    assert ["plans" in part.figures for part in page.parts] == [True, False]


def test_papers_come_before_studies_and_numbered_tables_first(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    write(tmp_path, TABLE.replace("Table 9", "appendix"), "another")
    (tmp_path / "a_study").mkdir()
    (tmp_path / "a_study" / "paper.toml").write_text('title = "A study"\n')
    (tmp_path / "a_study" / "own.toml").write_text(TABLE)
    made = [pages.of_table(table, None) for table in load_all(tmp_path).values()]
    assert [
        (paper.key, [page.table.path.stem for page in group]) for paper, group in pages.papers(made)
    ] == [("small", ["digits", "another"]), ("a_study", ["own"])]


def test_total_counts_a_cell_once(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, SCALES)
    results = Results(table)
    for scale in ("paper", "small"):
        for seed in (0, 1):
            add(results, job_of(table, seed=seed)._replace(scale=table.scales[scale]), 0.9)
    *counts, hours = pages.total([pages.of_table(table, None)])
    assert counts == [2, 1, 4] and hours == pytest.approx(4 * 1.5 / 3600)


def test_spent() -> None:
    expected = ["2.2 hours", "30.0 minutes", "36 seconds"]
    assert [pages.spent(hours) for hours in (2.25, 0.5, 0.01)] == expected


def test_a_tuned_form_is_a_separate_part(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    form = tuned(table, 3)
    results, scale = Results(form), form.scales["small"]
    for job, accuracy in zip(
        engine.searches(form, scale, form.cells["lamb"]), (0.8, 0.9, 0.7), strict=True
    ):
        add(results, job, accuracy)
    best = engine.measurements(form, scale, form.cells["lamb"], 1, results)
    assert best is not None
    add(results, best[0], 0.95, chosen=best[0].chosen)
    page = pages.of_table(table, None)
    assert [part.name for part in page.parts] == ["small-tuned", "small"]
    part = page.parts[0]
    assert part.about.startswith("Tuned: the best of 3 values of optimizer.learning_rate per cell")
    row = part.rows[0]
    assert (row.id, row.measured, row.run[-9:]) == ("small-tuned-lamb", "95.0", " --tune=3")
    # The command has the rate chosen by the search.
    rate = dict(row.configs[0].values)["optimizer.learning_rate"]
    assert f"--config.optimizer.learning_rate={rate} " in row.commands[0]
    assert len({row.id for part in page.parts for row in part.rows}) == 6
    expected = [("small-tuned", "lamb"), ("small-tuned", "adamw"), ("small-tuned", "lars")]
    assert [(part.name, row.cell.name) for part, row in page.best] == expected
