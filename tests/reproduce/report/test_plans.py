"""Planned learning rates follow the schedules of the configs, over all phases of a run."""

import pathlib

import numpy as np
import pytest

from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.report import plans
from lamb_tpu.reproduce.report.plans import RateCurve
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import summaries
from lamb_tpu.reproduce.tables import Table
from tests import figures
from tests.reproduce.papers import TABLE, write


def made(table: Table, scale: str) -> dict[str, RateCurve]:
    actual = summaries(table, table.scales[scale], Results(table))
    return {plan.cell: plan for plan in plans.plans(table, table.scales[scale], actual)}


def test_a_plan_is_the_schedule(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'duration = "4 steps"',
        'duration = "10 steps", "schedule.warmup" = '
        '"50 percent", "schedule.scaling" = "identity", '
        '"optimizer.learning_rate" = 0.5',
    )
    actual = made(write(tmp_path, text), "small")
    assert set(actual) == {"lamb", "adamw"}  # the cell that cannot be run has no plan
    times, rates = zip(*actual["lamb"].points)
    assert times == tuple(range(0, 100, 10))
    assert rates[0] == 0 and rates[5] == max(rates) == pytest.approx(0.5)
    # The length of an epoch is known only if the scale gives the number of examples.
    text = text.replace("10 steps", "10 epochs")
    assert made(write(tmp_path, text.replace("examples = 1_437", "")), "small") == {}
    actual = made(write(tmp_path, text.replace("1_437", "1_280")), "small")
    assert len(actual["lamb"].points) == 100


def test_phases_follow_one_another() -> None:
    table = load_all(folder())["lamb/mixed_batch"]
    times, rates = np.array(made(table, "paper")["nvidia"].points).T
    assert (np.diff(times) > 0).all() and 99 < times[-1] < 100
    second = times >= 100 * 7038 / (7038 + 1563)
    # The peak rates of NVIDIA's recipe, up to the spacing of the points; phase 2 has a warm-up too.
    assert rates[~second].max() == pytest.approx(6e-3, rel=0.03)
    assert rates[second].max() == pytest.approx(4e-3, rel=0.03)
    assert rates[second][0] < 1e-3


def test_draw() -> None:
    lines = [
        RateCurve("lamb-512", "lamb", ((0.0, 0.0), (50.0, 1.0))),
        RateCurve("lamb-1k", "lamb", ((0.0, 0.0), (50.0, 2.0))),
        RateCurve("baseline", "adamw", ((0.0, 0.1),)),
    ]
    figure = plans.draw(lines)
    figures.check(figure)
    first, second = figure.axes
    assert [first.get_title(), second.get_title()] == ["LAMB", "AdamW"]
    assert figures.names(figure) == ["lamb-512", "lamb-1k", "baseline"]
    assert list(first.lines[1].get_ydata()) == [0.0, 2.0]
    assert len(plans.draw([plan._replace(optimizer=plan.cell) for plan in lines] * 2).axes) == 3


def test_equal_plans_are_one_line() -> None:
    up, down = ((0.0, 0.0), (50.0, 1.0)), ((0.0, 1.0), (50.0, 0.0))
    lines = [RateCurve(f"lamb-{n}", "lamb", up) for n in range(3)] + [
        RateCurve("down", "lamb", down)
    ]
    (axes,) = plans.draw(lines).axes
    assert [line.get_label() for line in axes.lines] == ["lamb-0 and 2 more", "down"]
    (axes,) = plans.draw(lines[:3]).axes
    assert [line.get_label() for line in axes.lines] == ["lamb-0 and 2 more"]


def test_many_plans_of_an_optimizer_are_in_axes_of_few() -> None:
    lines = [
        RateCurve(f"lamb-{n}", "lamb", tuple((t, t * n) for t in range(30))) for n in range(1, 11)
    ]
    figure = plans.draw(lines)
    figures.check(figure)
    assert [axes.get_title() for axes in figure.axes] == ["LAMB, 1 of 2", "LAMB, 2 of 2"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert figures.names(figure) == [plan.cell for plan in lines]
