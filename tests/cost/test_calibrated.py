"""The constants that plans take are those of the page of the calibration."""

import pytest

from experiments.plan import generated, logged, page, rows
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.network import Calibrations


def test_they_follow_from_the_runs() -> None:
    expected = page.calibrations(*page.lines_of(logged.load_all(), rows.load_kept()))
    assert list(CALIBRATED.known) == list(expected.known)
    pairs = [(CALIBRATED.known[version], expected.known[version]) for version in expected.known]
    for found, each in [*pairs, (CALIBRATED.unseen, expected.unseen)]:
        for one, other in zip(found, each, strict=True):
            assert vars(one) == pytest.approx(vars(other), rel=0.01)
    assert CALIBRATED.fitted_to == expected.fitted_to
    found, wanted = CALIBRATED.validation, expected.validation
    assert found[:2] == wanted[:2]  # numbers of runs
    for errors, each in zip(found[2:], wanted[2:], strict=True):
        assert errors == pytest.approx(each, rel=0.01)


def test_the_module_is_the_generated_text() -> None:
    text = generated.text(CALIBRATED)
    assert generated.PATH.read_text() == text
    made: dict[str, Calibrations] = {}
    exec(text, made)
    assert made["CALIBRATED"] == CALIBRATED
