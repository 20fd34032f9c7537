"""Several plans, one after the other: rejections, progress, and repeated requests."""

import math

import pytest

from lamb_tpu.plan.trials import Trials
from lamb_tpu.spec import parse
from tests import tiny
from tests.plan import planned
from tests.raising import rejected


def test_outcomes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned.instead(
        monkeypatch,
        lambda config, _: {64: (1.548, 100), 128: (20, 1), 256: "fails"}[config.batch_size],
    )
    with Trials(3) as each:
        fits, crowded, failed = (
            each.make(parse(tiny.digits(batch_size=batch)), "v3-8", f"batch {batch}")
            for batch in (64, 128, 256)
        )
        assert each.make(parse(tiny.digits(batch_size=64)), "v3-8", "again") is fits
        with rejected("the step", problem="fails"):
            each.first(parse(tiny.digits(batch_size=256)), "v3-8", "")
    assert len(made) == 3
    assert fits.cells() == ("yes", "10 %", "100 (95 to 110)")
    assert fits.expected == pytest.approx(0.1)
    assert fits.describe() == "10 % of memory, 100 (95 to 110) ms a step"
    assert fits.totals.seconds == pytest.approx((9.5, 10, 11))
    assert crowded.cells() == ("no", "129 %", "") and crowded.expected == math.inf
    assert failed.cells() == ("rejected",) and not failed.fits
    assert failed.as_json() == {
        "rejected": "the step fails",
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
        each.make(parse(tiny.digits()), "v3-8", "batch 64")
    output = capsys.readouterr().err
    assert "1/7" in output and "batch 64" in output and "compiling" not in output
