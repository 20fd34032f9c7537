"""The list of what an accelerator should measure first has commands that work."""

import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from lamb_tpu.reproduce import __main__ as reproduce
from tests.tiny import ROOT

SCRIPT = ROOT / "experiments" / "accelerator.sh"


def commands(data: pathlib.Path, out: pathlib.Path) -> list[list[str]]:
    text = SCRIPT.read_text().replace("\\\n", " ").replace("$data", str(data))
    lines = text.replace("$out", str(out)).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("python ")]


def test_runs_are_of_tables(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mnist", "cifar10"):
        (tmp_path / name).mkdir()
    told = []
    for words in commands(tmp_path, tmp_path / "out"):
        if words[2] == "lamb_tpu.reproduce":
            reproduce.main(reproduce._parse([*words[3:], "--dry-run"]))
            told.append(capsys.readouterr().out)
    # Nobody has measured a run of them on this kind of device, or its estimate exceeds the budget.
    assert [text.partition(":")[0] for text in told] == ["lamb/mnist, paper", "lamb/cifar10, paper"]


@pytest.mark.long
def test_the_benchmark_names_a_platform_that_is_not_there(tmp_path: pathlib.Path) -> None:
    (words,) = (words for words in commands(tmp_path, tmp_path) if "lamb_tpu" not in words[2])
    done = subprocess.run(
        [sys.executable, *words[1:-1]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert words[-1] == "--write" and done.returncode == 2
    assert "--platform is 'gpu', and JAX has cpu" in done.stderr + done.stdout


def test_it_is_a_script() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
