"""Text about a run for the terminal."""

import dataclasses
import pathlib

import pytest
from ml_collections import ConfigDict

from lamb_tpu import terminal
from lamb_tpu.run.build import prepare
from lamb_tpu.run.describe import describe
from tests import tiny


def test_summary_says_what_was_resolved(tmp_path: pathlib.Path) -> None:
    text = describe(prepare(tiny.digits(), tmp_path))
    for part in (
        f"workdir: {tmp_path}",
        "data=8 over 8 cpu",
        "train[:256] 256 and test 360 examples",
        "12 updates of 64 examples = 3 epochs of 256",
        "warm-up 4 updates = 1 epochs",
        "hidden0/kernel",
        "total: 4 leaves",
        "LAMB adapts 1,184 of 1,210 values; Adam: the rest; decay: 1,184; state: mu",
    ):
        assert part in text, (part, text)


def test_a_custom_optimizer_shows_its_state() -> None:
    config = tiny.digits()
    config.optimizer = ConfigDict({"name": "optax:adabelief", "learning_rate": 0.01})
    text = tiny.unbroken(describe(prepare(config, None)))
    assert "optax:adabelief: all 1,210 values; state: mu,nu float32; 9,680 bytes" in text


def test_a_table_that_would_push_the_settings_off_the_screen_stays_in_its_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(tiny.digits(), tmp_path)
    rows = len(describe(run).splitlines())
    monkeypatch.setattr(terminal, "ROWS", rows)
    assert "hidden0/kernel" in describe(run)
    monkeypatch.setattr(terminal, "ROWS", rows - 1)
    text = describe(run)
    assert "\nparameters: the table is in parameters.txt; total: 4 leaves" in text
    assert "hidden0/kernel" not in text
    assert "hidden0/kernel" in describe(
        prepare(tiny.digits(), None)
    )  # there is no file for the table


def test_a_table_that_is_too_wide_stays_in_its_file(tmp_path: pathlib.Path) -> None:
    run = prepare(tiny.digits(), tmp_path)
    wide = dataclasses.replace(run, table=run.table.replace("hidden0/kernel", "k" * 60))
    assert "the table is in parameters.txt; total: 4 leaves" in describe(wide)


def test_notes_of_the_data_are_shown() -> None:
    run = prepare(tiny.digits(), None)
    run.train_set.notes, run.eval_set.notes = ("3 were left out", "and 1 more"), ("none was",)
    lines = describe(run).splitlines()
    (data,) = [number for number, line in enumerate(lines) if line.startswith("data: digits")]
    assert lines[data + 1 : data + 4] == ["3 were left out", "and 1 more", "none was"]
