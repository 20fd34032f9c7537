"""Tests the command `lamb_tpu demo`, which `make demo` runs."""

import pathlib
import re

import pytest

from lamb_tpu import demo
from tests.shared import ROOT


def test_make_demo_is_the_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo: setup\n\t$(RUN) -m lamb_tpu.demo $(FLAGS)\n" in makefile


@pytest.mark.long
def test_demo_trains_and_reports(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo.main(demo._parse(["--seeds=1", "--cells=lamb-legw-512"]))
    output = capsys.readouterr().out
    assert re.search(r"LAMB, LEGW +- +- +\d\d\.\d +-\n", output)
    paths = [pathlib.Path(line) for line in output.splitlines() if line.startswith("runs/")]
    assert {path.name for path in paths} >= {"demo-scaling.html", "demo-scaling.md"}
    assert any(path.suffix == ".svg" for path in paths) and all(path.exists() for path in paths)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    demo.main(demo._parse(["--seeds=1", "--cells=lamb-legw-512"]))  # nothing is left to train
    assert "run 1 of" not in capsys.readouterr().out
