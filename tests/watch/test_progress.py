"""Progress as shown at the terminal."""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from lamb_tpu.store.position import Position
from lamb_tpu.watch import progress as progress_lib
from lamb_tpu.watch.clock import Clock
from lamb_tpu.watch.progress import RunProgress, format_seconds, format_values
from tests.watch.observing import record, start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_lib.time, "monotonic", lambda: now[0])
    return now


@contextlib.contextmanager
def run(
    label: str,
    total_steps: int,
    batch_size: int,
    first: int = 1,
    after: float = 1.0,
    recipe: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[RunProgress, Any]]:
    """The progress of a run after its first update, and a function that shows another record."""
    facts = {
        "total_steps": total_steps,
        "batch_size": batch_size,
        "epoch": lambda step: step / 100,
        "place": lambda step: step,
        "path": None,
        "decides": False,
        **(recipe or {}),
    }
    progress = RunProgress(label, SimpleNamespace(**facts), **options)
    began = Clock(Position(), time.monotonic() - after)
    progress.started(start(first - 1, clock=began))
    progress.updated(first, None)
    yield progress, lambda step, values: progress.recorded(record(step, values))
    progress.ended()


def test_formats() -> None:
    assert format_values({"loss": 0.123456, "accuracy": 1.0}) == "loss 0.1235, accuracy 1"
    assert [format_seconds(s) for s in (0, 59.9, 61, 3600, 36_061)] == [
        "0:00",
        "0:59",
        "1:01",
        "1:00:00",
        "10:01:01",
    ]


def test_lines_where_there_is_no_terminal(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    with run("train", 1000, 64, after=2.5) as (progress, show):
        progress.message("a [bracket] and :train: stay")
        for step in range(2, 42):
            clock[0] += 0.5
            show(step, {"loss": 1 / step})
    lines = capsys.readouterr().out.splitlines()
    first = "first update after 2.5 s, reading data and compiling included"
    assert lines[:2] == [first, "a [bracket] and :train: stay"]
    # Twenty seconds at two updates a second: one line each ten.
    assert lines[2:] == [
        "update 21/1000: loss 0.04762; 128 examples/s, 8:09 left",
        "update 41/1000: loss 0.02439; 128 examples/s, 7:59 left",
    ]


def test_resumed_run_counts_its_own_updates_only(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    with run("train", 1000, 64, first=901) as (_, show):
        clock[0] += 20
        show(941, {})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "update 941/1000: ; 128 examples/s, 0:29 left"


def test_rate_of_tokens(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    with run("train", 1000, 64, tokens=64 * 128) as (_, show):
        clock[0] += 20
        show(41, {})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "update 41/1000: ; 16,384 tokens/s, 7:59 left"


def changing(step: int) -> int:
    """Examples after updates of 64 and, from update 100 on, of 256."""
    return 64 * min(step, 100) + 256 * max(step - 100, 0)


def test_time_left_of_a_batch_that_changes(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    options = {"path": "one", "examples": changing, "place": lambda step: changing(step) / 64}
    with run("train", 200, 64, recipe=options) as (_, show):
        clock[0] += 10
        show(81, {})  # 80 updates in ten seconds; 19 are left of these, and 100 of four times more
        clock[0] += 10
        show(101, {})
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [
        "update 81/200: ; 512 examples/s, 0:52 left",
        "update 101/200: ; 330 examples/s, 1:16 left",
    ]


def test_decisions_to_come_make_the_number_of_updates_a_guess(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    with run("train", 200, 64, recipe={"decides": True}) as (_, show):
        clock[0] += 10
        show(81, {})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "update 81/~200: ; 512 examples/s, 0:14 left"


def test_bar_of_a_batch_that_changes_counts_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    options = {"path": "one", "examples": changing, "place": lambda step: changing(step) / 64}
    with run("train", 200, 64, recipe=options) as (_, show):
        show(101, {"loss": 0.25})
    assert "6656/32000" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)


@pytest.mark.parametrize("options", [{"quiet": True}, {"shown": False}])
def test_quiet(clock: list[float], capsys: pytest.CaptureFixture, options: dict[str, bool]) -> None:
    with run("train", 10, 64, **options) as (progress, show):
        progress.message("nothing")
        clock[0] += 100
        show(5, {"loss": 1.0})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, quiet: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with run("seed 3", 10, 64, quiet=quiet) as (progress, show):
        progress.message("above the bar")
        show(10, {"loss": 0.25})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "seed 3" in shown and "10/10" in shown and "examples/s" in shown and "left" in shown
    assert "loss 0.25" in shown and ("above the bar" in shown) is not quiet


def test_bar_of_a_long_run_fits_80_columns(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with run("train phase_1", 1_000_000, 65_536, tokens=65_536 * 128) as (_, show):
        clock[0] += 7200
        show(500_000, {"loss": 6.123456, "accuracy": 0.5, "learning_rate": 0.001})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    last = re.split(r"[\r\n]+", shown.strip())[-1]
    assert len(last) <= 80 and "\u2026" not in last  # nothing is cut
    assert re.search(r" left \d:\d\d:\d\d$", last.rstrip())
    for part in ("train phase_1", "500000/1000000", "583M tokens/s", "loss 6.123", "left"):
        assert part in last, (part, last)


def test_messages_and_warnings_fit_80_columns(capsys: pytest.CaptureFixture) -> None:
    metrics = {
        f"{kind}{name}": 0.123456
        for kind in ("", "ema_")
        for name in ("accuracy", "loss", "top5_accuracy")
    }
    with run("train", 10, 64) as (progress, _):
        progress.evaluated(1234, metrics)
        progress.warn("update 5 is left out: " + "why " * 30)
    told = capsys.readouterr()
    for lines in (told.out.splitlines(), told.err.splitlines()):
        assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert "update 1234 (epoch 12.34): accuracy 0.1235, " in told.out
    assert "ema_top5_accuracy 0.1235" in told.out


def test_hidden_even_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with run("train", 10, 64, shown=False) as (progress, show):
        progress.message("nothing")
        show(10, {})
    assert capsys.readouterr().out == ""
