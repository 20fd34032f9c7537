"""Trials are ranked by their means, and the figure has a point for each trial."""

import pathlib
from collections.abc import Sequence

import pytest

from lamb_tpu.reproduce import engine, trials
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.sweeps import Sweep
from tests import figures
from tests.reproduce.test_results import add
from tests.reproduce.test_sweeps import make

SEARCHES = ("optimizer.learning_rate=log(1e-3,1e-1)", "optimizer.name=lamb,adamw")


def measured(
    folder: pathlib.Path, accuracies: Sequence[Sequence[float | None]], **options: str
) -> tuple[Sweep, list[Summary]]:
    """Returns a sweep of four trials and their ranking; `accuracies` has the values of each trial."""
    sweep = make(folder, *SEARCHES, trials=4, seeds=2, **options)
    results = Results(sweep.table)
    for job in engine.due(sweep.table, sweep.scale, sweep.cells, 2, results):
        values = accuracies[sweep.cells.index(job.cell)]
        if job.seed < len(values):
            name = str(job.cell.overrides["optimizer.name"])
            add(results, job, values[job.seed], optimizer=name, seconds=40)
    return sweep, trials.ranked(sweep, results)


def test_the_best_comes_first(tmp_path: pathlib.Path) -> None:
    sweep, actual = measured(tmp_path, [[], [0.9, None], [0.5, 0.7], [0.8]])
    head, *rows = trials.rows(sweep, actual)
    expected = ["trial", "learning_rate", "optimizer.name", "accuracy", "seeds", "updates", "time"]
    assert head == expected
    assert [row[0] for row in rows] == ["trial-003", "trial-002", "trial-001", "trial-000"]
    assert [row[3:] for row in rows] == [
        ["0.8000", "1", "4", "0:40"],
        ["0.6000 ± 1.2706", "2", "4", "1:20"],
        ["1 of 2 at 0.9000; 1 diverged", "2", "4", "1:20"],
        ["not run", "", "", ""],
    ]
    rate = sweep.cells[3].overrides["optimizer.learning_rate"]
    command = trials.best_command(sweep, actual)
    assert command is not None and f"--config.optimizer.learning_rate={rate:.6g} " in command
    assert command.endswith(f"--config.seed=0 --workdir={tmp_path / 'best'}")
    page = trials.page(sweep, actual)
    assert command in page and f"| trial-003 | {rate:.6g} |" in page
    assert "Measured on 1 x cpu, 2 cores" in page


def test_lower_is_better(tmp_path: pathlib.Path) -> None:
    _, actual = measured(tmp_path, [[0.4], [0.1], [0.3], [0.2]], better="lower")
    assert [summary.mean for summary in actual] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_no_trial_has_a_value(tmp_path: pathlib.Path) -> None:
    sweep, actual = measured(tmp_path, [[None], [], [], []])
    assert trials.best_command(sweep, actual) is None
    assert "best trial:" not in trials.page(sweep, actual)
    assert len(trials.draw(sweep, actual).axes) == 2


def test_figure(tmp_path: pathlib.Path) -> None:
    sweep, actual = measured(tmp_path, [[0.9], [0.9, None], [0.5, 0.7], [0.8]])
    figure = trials.draw(sweep, actual)
    rates, names = figure.axes
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
    assert figures.names(figure) == ["AdamW", "LAMB"]
    figures.check_space(figure, readable=False)
