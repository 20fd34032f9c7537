"""Times of a run on several slices: sums over phases, measured times, table and plot."""

import json
import pathlib

import pytest

from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.plan import curves
from lamb_tpu.plan.curves import Point
from lamb_tpu.plan.trials import Trial, Trials
from lamb_tpu.spec import Spec, parse
from tests import figures, tiny
from tests.plan import planned
from tests.raising import rejected

SLICES = ("v3-8", "v3-32", "v3-128", "v3-512")


def points(monkeypatch: pytest.MonkeyPatch, measured: dict[str, float]) -> list[Point]:
    """Plans 100 updates of 480 / devices seconds; v3-128 has too little memory, and v3-512 is rejected."""

    def outcome(config: Spec, name: str) -> tuple[float, float] | str:
        devices = int(name.removeprefix("v3-"))
        if devices == 512:
            return "does not divide evenly"
        return (20 if devices == 128 else 1), 6e4 * 8 / devices

    planned.instead(monkeypatch, outcome)
    with Trials(len(SLICES)) as trials:
        return curves.plan([("", parse(tiny.digits()))], SLICES, measured, trials)


@pytest.mark.long
def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = curves.answer(points(monkeypatch, {"v3-32": 1200.0, "v3-128": 600.0}))
    lines = answer.text.splitlines()
    assert lines[0].split("  ")[-2:] == ["measured", "predicted/measured"]
    assert lines[1].split()[:2] == ["v3-8", "8"] and "100 min  95 to 110 min" in lines[1]
    assert lines[2].endswith("1.25")
    assert "does not fit" in lines[3] and lines[3].endswith("10 min")
    text = tiny.unbroken(answer.text)
    assert "v3-512 512 rejected: the step does not divide evenly left out:" in text
    [_, second, crowded, failed] = json.loads(json.dumps(answer.json))["points"]
    assert second["predicted_by_measured"] == pytest.approx(1.25)
    assert second["seconds"] == pytest.approx([1425, 1500, 1650])
    assert crowded["seconds"] is failed["seconds"] is None
    plain = curves.answer(points(monkeypatch, {}))
    assert "measured" not in plain.text


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda config, _: (1, config.batch_size))
    phases = [(f"phase_{size}", parse(tiny.digits(batch_size=size))) for size in (64, 32)]
    with Trials(2) as trials:
        [point] = curves.plan(phases, ["v3-8"], {}, trials)
    assert point.seconds == pytest.approx((9.12, 9.6, 10.56))
    assert point.cells()[2] == "64 + 32"


@pytest.mark.long
def test_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    actual = points(monkeypatch, {"v3-32": 1200.0})
    pages = []
    for name in ("a.html", "b.html"):
        curves.write_page(actual, curves.answer(actual), tmp_path / name)
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1] and pages[0].count("<svg") == 1
    assert f"Validated: {CALIBRATED.validation.describe()}." in pages[0]
    for part in ("predicted", "measured", "devices", "Time of the run on each slice", "1.25"):
        assert part in pages[0]
    figure = curves.plot(actual)
    figures.check_space(figure)
    assert figures.names(figure) == ["interval", "predicted", "measured"]
    [axes] = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    line, measured = axes.lines
    assert list(measured.get_xydata()[0]) == [32, 20]
    assert list(line.get_xdata()) == [8, 32] and list(line.get_ydata()) == pytest.approx([100, 25])


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: "fails")
    with Trials(1) as trials, rejected("the step", problem="fails") as raised:
        curves.plan([("", parse(tiny.digits()))], ["v3-8"], {}, trials)
    point = Point("v3-8", 8, (Trial(None, error=raised.value),), None)
    assert not curves.plot([point]).axes[0].lines
