"""Tests that plans use the constants of the calibration page."""

import pytest

from experiments.plan import generated, interval, logged, page, rows
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.network import Calibrations


def test_they_follow_from_the_runs() -> None:
    expected = page.calibrations(*page.lines_of(logged.load_all(), rows.load_rows()))
    assert list(CALIBRATED.known) == list(expected.known)
    pairs = [(CALIBRATED.known[version], expected.known[version]) for version in expected.known]
    for actual, each in [*pairs, (CALIBRATED.unseen, expected.unseen)]:
        for one, other in zip(actual, each, strict=True):
            assert vars(one) == pytest.approx(vars(other), rel=0.01)
    assert CALIBRATED.fitted_to == expected.fitted_to
    counted, wanted = CALIBRATED.validation, expected.validation
    assert counted[:2] == wanted[:2]  # numbers of runs
    for errors, exact in zip(counted[2:], wanted[2:], strict=True):
        assert errors == pytest.approx(exact, rel=0.01)


def test_the_module_is_the_generated_text() -> None:
    text = generated.text(CALIBRATED)
    assert generated.PATH.read_text() == text
    made: dict[str, Calibrations] = {}
    exec(text, made)
    assert made["CALIBRATED"] == CALIBRATED


def test_the_published_runs_are_covered_when_they_are_left_out() -> None:
    _, lines = page.lines_of(rows.load_sources(), rows.load_rows())
    actual = interval.validate([line.sample for line in lines])
    covered, number = actual.programs
    assert number >= 31 and covered >= 0.9 * number
    # There are two generations, so each is predicted only from the other.
    assert actual.generations["v4"] == (7, 7)
    covered, number = actual.generations["v3"]
    assert number >= 24 and covered >= 0.9 * number
    # A program with other runs in the fit has a much smaller error than a new program.
    assert actual.known_program[0] < 0.02 < 0.1 < actual.new_program[0]
