"""Times on several slices: phases added up, beside measured times, as a table and a picture."""

import json
import pathlib

import pytest
from ml_collections import ConfigDict

from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.errors import UserError
from lamb_tpu.plan import curves
from lamb_tpu.plan.curves import Point
from lamb_tpu.plan.trials import Trial, Trials
from tests import tiny
from tests.plan import planned

SLICES = ("v3-8", "v3-32", "v3-128", "v3-512")


def points(monkeypatch: pytest.MonkeyPatch, measured: dict[str, float]) -> list[Point]:
    """100 updates of a minute on 8 devices, fewer on more; too many devices are refused."""

    def outcome(config: ConfigDict, name: str) -> tuple[float, float] | str:
        devices = int(name.removeprefix("v3-"))
        if devices == 512:
            return "config.batch_size is 64, which does not divide"
        return (20 if devices == 128 else 1), 6e4 * 8 / devices

    planned.instead(monkeypatch, outcome)
    with Trials(len(SLICES)) as trials:
        return curves.plan([("", tiny.digits())], SLICES, measured, trials)


@pytest.mark.long
def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = curves.answer(points(monkeypatch, {"v3-32": 1200.0, "v3-128": 600.0}))
    lines = answer.text.splitlines()
    assert lines[0].split("  ")[-2:] == ["measured", "predicted/measured"]
    assert lines[1].split()[:2] == ["v3-8", "8"] and "100 min  95 to 110 min" in lines[1]
    assert lines[2].endswith("1.25")
    assert "does not fit" in lines[3] and lines[3].endswith("10 min")
    text = tiny.unbroken(answer.text)
    assert "v3-512 512 refused: config.batch_size is 64, which does not divide left out:" in text
    [_, second, crowded, refused] = json.loads(json.dumps(answer.json))["points"]
    assert second["predicted_by_measured"] == pytest.approx(1.25)
    assert second["seconds"] == pytest.approx([1425, 1500, 1650])
    assert crowded["seconds"] is refused["seconds"] is None
    plain = curves.answer(points(monkeypatch, {}))
    assert "measured" not in plain.text


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda config, _: (1, config.batch_size))
    phases = [("phase_1", tiny.digits(batch_size=64)), ("phase_2", tiny.digits(batch_size=32))]
    with Trials(2) as trials:
        [point] = curves.plan(phases, ["v3-8"], {}, trials)
    assert point.seconds == pytest.approx((9.12, 9.6, 10.56))
    assert point.cells()[2] == "64 + 32"


@pytest.mark.long
def test_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    found = points(monkeypatch, {"v3-32": 1200.0})
    pages = []
    for name in ("a.html", "b.html"):
        curves.write_page(found, curves.answer(found), tmp_path / name)
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1] and pages[0].count("<svg") == 1
    assert f"Validated: {CALIBRATED.validation.describe()}." in pages[0]
    for part in ("predicted", "measured", "devices", "Time of the run on each slice", "1.25"):
        assert part in pages[0]
    [axes] = curves.picture(found).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    [line] = axes.lines
    assert list(line.get_xdata()) == [8, 32] and list(line.get_ydata()) == pytest.approx([100, 25])


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: "no")
    with Trials(1) as trials, pytest.raises(UserError, match="^no$"):
        curves.plan([("", tiny.digits())], ["v3-8"], {}, trials)
    assert not curves.picture([Point("v3-8", 8, (Trial(None, refused="no"),), None)]).axes[0].lines
