"""Tests the rule for the duration of a test, in a separate pytest session."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import seconds

FILE = """
import time
import pytest
from tests import seconds

seconds.LIMIT, seconds.REFERENCE = 0.1, {reference}

def spend(amount):
    end = seconds.used() + amount
    while seconds.used() < end:
        pass

def test_short():
    time.sleep(0.5)

def test_over():
    spend(0.15)

def test_far_over():
    spend(0.9)

@pytest.mark.long
def test_long():
    spend(0.4)

@pytest.fixture
def prepared():
    spend(0.4)

def test_prepared(prepared):
    pass
"""


def session(folder: pathlib.Path, reference: float) -> str:
    path = folder / "test_these.py"
    path.write_text(FILE.format(reference=reference))
    command = [sys.executable, *"-m pytest -q -p tests.seconds -p no:cacheprovider".split()]
    root = str(pathlib.Path(__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(
        [*command, f"--rootdir={folder}", str(path)],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment,
    ).stdout


def test_tests_over_the_limit(tmp_path: pathlib.Path) -> None:
    text = session(tmp_path, reference=1e9)  # so large that this machine never counts as slower
    assert "4 passed" in text and "1 failed" in text
    assert "FAILED" in text.split("test_far_over")[-2].splitlines()[-1]
    assert "0.9 processor seconds, over 0.6: make the test shorter or mark it long" in text
    summary = text.split("over 0.1 processor seconds: shorten or mark long")[1]
    assert "test_over" in summary and "test_long" not in summary and "test_short" not in summary


def test_a_busy_machine_is_given_more(tmp_path: pathlib.Path) -> None:
    text = session(tmp_path, reference=1e-9)
    assert "5 passed" in text and "processor seconds" not in text


def test_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "REFERENCE", 1e-9)
    assert seconds.slowdown() > 1e3
    monkeypatch.setattr(seconds, "REFERENCE", 1e9)
    assert seconds.slowdown() == 1
