"""The figure of noise scale, cosine and critical batch, made from a record and from a run."""

import doctest
import json
import pathlib
from typing import Any

import jax
import pytest

from experiments.batching import measures
from lamb_tpu.critical_batch.branch import Branches
from lamb_tpu.errors import UserError
from tests import figures

ACTUAL: dict[str, Any] = {
    "commit": "0123456789ab",
    "jax": "0.10.2",
    "device": "cpu",
    "devices": 1,
    "cores": 2,
    "batch": 32,
    "updates": 40,
    "examples": 1_016,
    "tolerance": 0.02,
    "factors": [1, 2, 4],
    "span": 256,
    "seeds": 2,
    "scaling": "sqrt",
    "split": "train",
    "metric": "mlm_loss",
    "decay": 0.95,
    "step": [10, 20, 30, 40],
    "noise_scale": [8.0, None, 64.0, 96.0],
    "cosine": [0.8, 0.5, -0.1, 0.0],
    "places": [
        {
            "step": 12,
            "critical": 32,
            "beyond": True,
            "crossing": 45.3,
            "excess": [0.0, 0.04, None],
            "error": [0.0, 0.002, None],
        },
        {
            "step": 31,
            "critical": 128,
            "beyond": False,
            "crossing": 128.0,
            "excess": [0.0, -0.001, 0.004],
            "error": [0.0, 0.001, 0.002],
        },
    ],
}


def test_what_a_cosine_says() -> None:
    assert doctest.testmod(measures).failed == 0
    assert measures.implied(0.8, 32) == pytest.approx(4.0)
    assert [measures.implied(cosine, 32) for cosine in (None, 0.0, -0.2)] == [None] * 3
    # Halves of 16 examples whose noise trace is 48 times the squared gradient norm.
    assert measures.implied(16 / (16 + 48), 32) == pytest.approx(48)


def test_means_are_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "WINDOW", 3)
    assert measures.smooth([1.0, 2.0, 6.0, None, None, None]) == [1.5, 3.0, 4.0, 6.0, None, None]
    assert measures._number("inf") is None and measures._number(1.234567) == 1.2346


def test_table_figure_and_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "WINDOW", 1)
    assert measures.table(ACTUAL).splitlines()[2:] == [
        "| 12 | 32 | 45 | 8 | 0.800 | 4 | +4.0 ± 0.2 | diverged |",
        "| 31 | 128 or more |  | 64 | -0.100 | none | -0.1 ± 0.1 | +0.4 ± 0.2 |",
    ]
    figure = measures.draw(ACTUAL)
    figures.check_space(figure)
    upper, lower = figure.axes
    lines = {line.get_label(): line for line in upper.lines}
    assert list(lines["critical batch, by branches"].get_ydata()) == [45.3, 128.0]
    assert list(lines["or more: no batch was beyond the tolerance"].get_xdata()) == [31]
    by_cosine = list(lines["noise scale by the mean cosine"].get_ydata())
    assert by_cosine[:2] == pytest.approx([4.0, 16.0])
    assert str(lines["noise scale"].get_ydata().tolist()) == "[8.0, nan, 64.0, 96.0]"
    assert list(lower.lines[0].get_ydata()) == ACTUAL["cosine"]
    page = measures.page(ACTUAL)
    assert "branches of 256 examples, 2 seeds each" in page and measures.table(ACTUAL) in page
    assert "at most\n2 % above" in page and "jax 0.10.2" in page


def test_errors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "RECORD", tmp_path / "measures.json")
    with pytest.raises(UserError, match="--workdir is missing, and there is no record"):
        measures.main(measures._parse([f"--output={tmp_path}/a.svg"]))
    with pytest.raises(UserError, match="--scale='smoke' conflicts with --write; use small"):
        measures.main(measures._parse(["--workdir=a", "--scale=smoke", "--write"]))


def test_a_saved_record_makes_the_same_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "RECORD", tmp_path / "measures.json")
    measures.RECORD.write_text(json.dumps(ACTUAL))
    measures.main(measures._parse(["--write"]))
    assert json.loads(measures.RECORD.read_text()) == ACTUAL
    assert (tmp_path / "measures.md").read_text() == measures.page(ACTUAL)
    assert (tmp_path / "measures.svg").read_text().startswith("<?xml")


@pytest.mark.long
def test_a_run_and_its_branches(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:1]  # one device, as on a user's CPU
    monkeypatch.setattr(jax, "devices", lambda: devices)
    actual = measures.make(str(tmp_path / "run"), "smoke")
    assert [position["step"] for position in actual["places"]] == [5, 15]
    assert actual["step"][-1] == actual["updates"] == 24 and actual["span"] == 8 * 32
    assert all(-1 <= cosine <= 1 for cosine in actual["cosine"])
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual
    assert f"| {actual['places'][0]['critical']}" in measures.table(actual)

    def never(*_: Any) -> None:
        raise AssertionError("a branch was trained again")

    monkeypatch.setattr(Branches, "losses", never)
    assert measures.make(str(tmp_path / "run"), "smoke") == actual
