"""Tests the progress of branches, shown as lines and as a bar."""

import re

import pytest
from rich.console import Console

from lamb_tpu.critical_batch import progress as progress_lib
from lamb_tpu.critical_batch.progress import BranchProgress


def branches(progress: BranchProgress) -> None:
    with progress:
        for step, factor in ((1000, 1), (1000, 4)):
            progress.begins(step, factor)
            for _ in range(4):
                progress.trained(250)
            progress.ended(0.123456)


def test_lines(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # Four seconds per branch.
    clock = iter([0.0, 4.0, 4.0, 8.0, 8.0])
    monkeypatch.setattr(progress_lib.time, "monotonic", lambda: next(clock))
    branches(BranchProgress(2, 1000))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == [
        "branch 1/2: update 1,000, x1: loss 0.12346; 250 examples/s, 0:04 left",
        "branch 2/2: update 1,000, x4: loss 0.12346; 250 examples/s, 0:00 left",
    ]


def test_bar(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        progress_lib, "Console", lambda **_: Console(stderr=True, force_terminal=True, width=80)
    )
    branches(BranchProgress(2, 1000))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "branch 2/2: update 1,000, x4: loss 0.12346" in plain
    assert re.search(r"branch 2/2: update 1,000, x4 .*examples/s left 0:00:00", plain)
