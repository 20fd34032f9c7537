"""Tests the table and the figure of a study's outcome."""

import math
import pathlib
from xml.etree import ElementTree

import pytest

from lamb_tpu import style
from lamb_tpu.batching.critical import Critical, Excess
from lamb_tpu.critical_batch.measuring import Outcome, PositionOutcome
from lamb_tpu.critical_batch.report import draw, table, warnings
from lamb_tpu.run.build import prepare
from tests import figures, tiny
from tests.critical_batch.test_choices import study


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    of = study(starts=[100, 300], factors=[1, 2, 4], at=[12, 16])
    first = [Excess(mean, math.nan) for mean in (0.0, -0.004, 0.3125)]
    second = [Excess(mean, math.nan) for mean in (0.0, 0.0, math.inf)]
    rows = [
        PositionOutcome(100, first, Critical(128, 1234.4, True), 90.0),
        PositionOutcome(300, second, Critical(256, 256.0, False), math.inf),
    ]
    noise = [(10, 40.0), (100, 90.0), (300, math.inf), (310, -3.0)]
    return Outcome(prepare(tiny.digits(duration="1000 steps"), None), of, 0.01, rows, noise)


def seeded(outcome: Outcome) -> Outcome:
    rows = [
        row._replace(excesses=[Excess(0.0, 0.0), Excess(0.004, 0.02), Excess(0.3, 0.008)])
        for row in outcome.rows
    ]
    return outcome._replace(study=outcome.study._replace(seeds=[0, 1]), rows=rows)


def test_table(outcome: Outcome) -> None:
    assert (
        table(outcome)
        == """\
  update  of run  critical batch  crossing  noise scale
     100    10 %             128     1,234           90
     300    30 %     256 or more                    inf

loss on test after branches of 1,024 examples, relative to that at batch 64;
    learning rate: sqrt
  update  at 128    at 256
     100  -0.4 %   +31.2 %
     300  +0.0 %  diverged"""
    )


def test_table_of_seeds_and_without_noise_scale(outcome: Outcome) -> None:
    rows = [row._replace(noise_scale=None) for row in seeded(outcome).rows]
    lines = table(seeded(outcome)._replace(rows=rows, noise=[])).splitlines()
    assert lines[0] == "  update  of run  critical batch  crossing"
    assert lines[1] == "     100    10 %             128     1,234"
    assert tiny.unbroken(" ".join(lines[4:6])).startswith(
        "loss on test after branches of 1,024 examples, 2 seeds, relative to that at batch 64;"
    )
    assert lines[-1] == "     300  +0.4 ± 2.0 %  +30.0 ± 0.8 %"


def test_warnings(outcome: Outcome) -> None:
    assert warnings(outcome) == []
    first, _ = warnings(seeded(outcome))
    assert first.startswith("at update 100 excesses have standard errors of up to 2 %, more than ")
    assert warnings(seeded(outcome)._replace(tolerance=0.02)) == []


def test_figure(outcome: Outcome, tmp_path: pathlib.Path) -> None:
    figure = draw(outcome)
    over, by_batch = figure.axes
    line, least, noise, batch = over.lines
    # Four updates per epoch of 256 examples.
    epoch = 64 / outcome.run.recipe.num_examples
    assert list(line.get_xdata()) == [100 * epoch, 300 * epoch]
    assert list(line.get_ydata()) == [1234.4, 256.0]
    assert list(least.get_xdata()) == [300 * epoch]
    assert list(noise.get_ydata()) == [
        40.0,
        90.0,
    ]  # the infinite and the negative noise scale are left out
    assert list(batch.get_ydata()) == [64, 64] and over.get_yscale() == "log"
    figures.check_space(figure)
    labels = figures.names(figure)
    assert labels[0] == "critical batch" and labels[2:4] == ["noise scale", "batch of the run"]
    first, second = by_batch.lines[:2]
    assert list(first.get_ydata()) == pytest.approx([0.0, -0.4, 31.25])
    assert list(second.get_ydata()) == pytest.approx([0.0, 0.0, math.nan], nan_ok=True)
    assert set(labels[4:]) == {"update 100", "update 300", "tolerance"}
    text = style.svg(figure)
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_figure_of_seeds_has_error_bars(outcome: Outcome) -> None:
    bars = draw(seeded(outcome)).axes[1].containers[0]
    assert bars.has_yerr and not draw(outcome).axes[1].containers[0].has_yerr


def test_many_positions_are_split_among_axes(outcome: Outcome) -> None:
    rows = [outcome.rows[0]._replace(step=step) for step in range(100, 1100, 100)]
    figure = draw(outcome._replace(rows=rows))
    figures.check_space(figure)
    _, first, second = figure.axes
    assert [len(axes.containers) for axes in (first, second)] == [5, 5]
    assert first.get_ylim() == second.get_ylim()
