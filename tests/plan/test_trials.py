"""Several plans, one after the other: refusals, progress, and plans that are asked for twice."""

import doctest
import math

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan import trials
from lamb_tpu.plan.trials import Trials
from tests import tiny
from tests.plan import planned


def test_outcomes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned.instead(
        monkeypatch,
        lambda config, _: {64: (1.548, 100), 128: (20, 1), 256: "no room"}[config.batch_size],
    )
    with Trials(3) as each:
        fits, crowded, refused = (
            each.make(tiny.digits(batch_size=batch), "v3-8", f"batch {batch}")
            for batch in (64, 128, 256)
        )
        assert each.make(tiny.digits(batch_size=64), "v3-8", "again") is fits
        with pytest.raises(UserError, match="^no room$"):
            each.first(tiny.digits(batch_size=256), "v3-8", "")
    assert len(made) == 3
    assert fits.cells() == ("yes", "10 %", "100 (95 to 110)")
    assert fits.expected == pytest.approx(0.1)
    assert fits.describe() == "10 % of memory, 100 (95 to 110) ms a step"
    assert fits.totals.seconds == pytest.approx((9.5, 10, 11))
    assert crowded.cells() == ("no", "129 %", "") and crowded.expected == math.inf
    assert refused.cells() == ("refused",) and not refused.fits
    assert refused.as_json() == {
        "refused": "no room",
        "batch_size": None,
        "fits": False,
        "share_of_memory": None,
        "step_milliseconds": None,
    }
    assert fits.as_json()["step_milliseconds"] == pytest.approx([95, 100, 110])
    assert capsys.readouterr().err.splitlines() == [
        f"compiling batch {batch} ({number} of at most 3)"
        for number, batch in enumerate((64, 128, 256), 1)
    ]


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 100))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Trials(7) as each:
        each.make(tiny.digits(), "v3-8", "batch 64")
    told = capsys.readouterr().err
    assert "1/7" in told and "batch 64" in told and "compiling" not in told


def test_docstrings() -> None:
    assert doctest.testmod(trials) == (0, 1)
