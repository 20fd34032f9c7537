"""The table and the picture of an outcome."""

import math
import pathlib
from xml.etree import ElementTree

import pytest

from lamb_tpu import style
from lamb_tpu.batching.critical import Critical, Excess
from lamb_tpu.critical_batch.choices import Study
from lamb_tpu.critical_batch.measuring import Outcome, Row
from lamb_tpu.critical_batch.report import picture, table, warnings
from lamb_tpu.run.build import prepare
from tests import tiny

ONE = Excess(0.0, math.nan)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    study = Study([100, 300], [1, 2, 4], [12, 16], "sqrt", [0], "test", "loss")
    rows = [
        Row(
            100,
            [ONE, Excess(-0.004, math.nan), Excess(0.3125, math.nan)],
            Critical(128, 1234.4, True),
            90.0,
        ),
        Row(
            300,
            [ONE, Excess(0.0, math.nan), Excess(math.inf, math.nan)],
            Critical(256, 256.0, False),
            math.inf,
        ),
    ]
    noise = [(10, 40.0), (100, 90.0), (300, math.inf), (310, -3.0)]
    return Outcome(prepare(tiny.digits(duration="1000 steps"), None), study, 0.01, rows, noise)


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


def test_picture(outcome: Outcome, tmp_path: pathlib.Path) -> None:
    figure = picture(outcome)
    over, by_batch = figure.axes
    line, least, noise, own = over.lines
    # Four updates an epoch of 256 examples.
    epoch = 64 / outcome.run.recipe.num_examples
    assert list(line.get_xdata()) == [100 * epoch, 300 * epoch]
    assert list(line.get_ydata()) == [1234.4, 256.0]
    assert list(least.get_xdata()) == [300 * epoch]
    assert list(noise.get_ydata()) == [40.0, 90.0]  # infinite and negative ones have no place
    assert list(own.get_ydata()) == [64, 64] and over.get_yscale() == "log"
    labels = [text.get_text() for text in over.get_legend().get_texts()]
    assert labels[0] == "critical batch" and labels[2:] == ["noise scale", "batch of the run"]
    first, second = by_batch.lines[:2]
    assert list(first.get_ydata()) == pytest.approx([0.0, -0.4, 31.25])
    assert list(second.get_ydata()) == pytest.approx([0.0, 0.0, math.nan], nan_ok=True)
    text = style.svg(figure)
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_picture_of_seeds_has_error_bars(outcome: Outcome) -> None:
    bars = picture(seeded(outcome)).axes[1].containers[0]
    assert bars.has_yerr and not picture(outcome).axes[1].containers[0].has_yerr
