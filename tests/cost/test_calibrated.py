"""The constants that plans take are those of the page of the calibration."""

import dataclasses

import pytest

from experiments.plan import fit, page, rows
from lamb_tpu.cost.calibrated import CALIBRATED


def test_they_follow_from_the_published_runs() -> None:
    fitted, lines = page.lines_of(rows.load_sources(), rows.load_kept())
    expected = fit.calibration(fitted, [line.without_source for line in lines], "")
    for found, each in zip(CALIBRATED.each, expected.each, strict=True):
        assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(each), rel=0.01)
    assert CALIBRATED.generations == pytest.approx(expected.generations, rel=0.01)
    assert CALIBRATED.fitted_to.startswith(f"{len(lines)} published runs on TPU v3 and v4")
