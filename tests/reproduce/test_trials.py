"""Trials are ranked by their means, and the picture has a point for each."""

import pathlib
from collections.abc import Sequence

import pytest

from lamb_tpu.reproduce import engine, trials
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.sweeps import NAME, Sweep
from tests.reproduce.test_results import add
from tests.reproduce.test_sweeps import make

SEARCHES = ("optimizer.learning_rate=log(1e-3,1e-1)", "optimizer.name=lamb,adamw")


def measured(
    folder: pathlib.Path, accuracies: Sequence[Sequence[float | None]], **options: str
) -> tuple[Sweep, list[Summary]]:
    """A sweep of four trials with two seeds, with records for some of them."""
    sweep = make(folder, *SEARCHES, trials=4, seeds=2, **options)
    results = Results(sweep.table)
    for job in engine.due(sweep.table, sweep.scale, sweep.cells, 2, results):
        values = accuracies[sweep.cells.index(job.cell)]
        if job.seed < len(values):
            name = str(job.cell.overrides["optimizer.name"])
            add(results, job, values[job.seed], scale=NAME, optimizer=name, seconds=40)
    return sweep, trials.ranked(sweep, results)


def test_the_best_comes_first(tmp_path: pathlib.Path) -> None:
    sweep, found = measured(tmp_path, [[], [0.9, None], [0.5, 0.7], [0.8]])
    head, *rows = trials.rows(sweep, found)
    assert head == [
        "trial",
        "learning_rate",
        "optimizer.name",
        "accuracy",
        "seeds",
        "updates",
        "time",
    ]
    assert [row[0] for row in rows] == ["trial-003", "trial-002", "trial-001", "trial-000"]
    assert [row[3] for row in rows] == ["0.8000", "0.6000 ± 1.2706", "1 of 2 diverged", "not run"]
    assert [row[-3:] for row in rows] == [
        ["1", "4", "0:40"],
        ["2", "4", "1:20"],
        ["2", "4", "1:20"],
        ["", "", ""],
    ]
    rate = sweep.cells[3].overrides["optimizer.learning_rate"]
    command = trials.best_command(sweep, found)
    assert command is not None and f"--config.optimizer.learning_rate={rate:.6g} " in command
    assert command.endswith(f"--config.seed=0 --workdir={tmp_path / 'best'}")
    page = trials.page(sweep, found)
    assert command in page and f"| trial-003 | {rate:.6g} |" in page
    assert "Measured on 1 x cpu, 2 cores" in page


def test_lower_is_better(tmp_path: pathlib.Path) -> None:
    _, found = measured(tmp_path, [[0.4], [0.1], [0.3], [0.2]], better="lower")
    assert [summary.mean for summary in found] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_no_trial_has_a_value(tmp_path: pathlib.Path) -> None:
    sweep, found = measured(tmp_path, [[None], [], [], []])
    assert trials.best_command(sweep, found) is None and "best trial:" not in trials.page(
        sweep, found
    )
    assert len(trials.picture(sweep, found).axes) == 2


def test_picture(tmp_path: pathlib.Path) -> None:
    sweep, found = measured(tmp_path, [[0.9], [0.9, None], [0.5, 0.7], [0.8]])
    rates, names = trials.picture(sweep, found).axes
    assert (rates.get_xscale(), names.get_xscale()) == ("log", "linear")
    assert [label.get_text() for label in names.get_xticklabels()] == ["lamb", "adamw"]
    means, crosses = {}, set()
    for line in rates.lines:
        points = list(zip(map(float, line.get_xdata()), map(float, line.get_ydata())))
        if line.get_marker() == "x":
            crosses |= {x for x, _ in points}
        elif line.get_marker() in ("o", "s") and line.get_linestyle() == "None":
            means |= dict(points)
    rate = [cell.overrides["optimizer.learning_rate"] for cell in sweep.cells]
    assert crosses == {rate[1]}
    assert means == pytest.approx({rate[0]: 0.9, rate[2]: 0.6, rate[3]: 0.8})
    legend = rates.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == ["AdamW", "LAMB"]
