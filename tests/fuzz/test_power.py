"""The planted faults are patches that apply, each with a sentence."""

import pathlib
import subprocess

import pytest

from tests.fuzz import power

PATCHES = sorted(power.FAULTS.glob("*.patch"))


def test_there_are_faults() -> None:
    assert len(PATCHES) >= 30


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fault_applies(patch: pathlib.Path) -> None:
    sentence, empty, *_ = patch.read_text().splitlines()
    assert sentence.endswith(".") and not empty
    command = ["git", "apply", "--check", str(patch)]
    subprocess.run(command, cwd=power.ROOT, check=True, capture_output=True)


def test_rows() -> None:
    found = power.Found("fault", 12.3, "problem", "case")
    assert power.row(found) == "| fault | 12 | problem | case |"
    assert "not found" in power.row(found._replace(seconds=None))
    assert "false alarm" in power.row(found._replace(is_false=True))
